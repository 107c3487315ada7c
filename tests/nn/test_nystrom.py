"""NystromAttention: landmarks box by box in float64, the pseudo-inverse, and softmax attention in the limit."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ndlightnet.nn.mixers import NystromAttention
from ndlightnet.nn.mixers.nystrom import inverse

HEADS = 2


def box_by_box(m: NystromAttention, x: Tensor, mask: Tensor, pieces: int) -> Tensor:
    """Of each sample the tokens, in boxes of the grid between its first and its last real ones."""
    out, size = torch.zeros_like(x), x.shape[-1] // HEADS
    for sample, real in enumerate(mask):
        places = [at for at in product(*map(range, real.shape)) if real[at]]
        if not places:
            continue
        low, high = ([end(axis) for axis in zip(*places, strict=True)] for end in (min, max))
        boxes: dict[tuple, list[int]] = {}
        for i, at in enumerate(places):
            key = tuple((a - lo) * pieces // (hi + 1 - lo) for a, lo, hi in zip(at, low, high, strict=True))
            boxes.setdefault(key, []).append(i)
        tokens = torch.stack([x[sample][at] for at in places])
        heads = []
        for h in range(HEADS):
            rows = slice(h * size, (h + 1) * size)
            q, k, v = (tokens @ proj.weight[rows].T for proj in (m.q_proj, m.k_proj, m.v_proj))
            means = [torch.stack([sum(y[i] for i in box) / len(box) for box in boxes.values()]) for y in (q, k)]
            first, a, last = (
                (left @ right.T / size**0.5).softmax(-1) for left, right in ((q, means[1]), means, (means[0], k))
            )
            z = a.T / (a.sum(0).max() * a.sum(1).max())
            for _ in range(6):
                powers = [torch.linalg.matrix_power(a @ z, n) for n in range(4)]
                z = sum(c * z @ power for c, power in zip((13, -15, 7, -1), powers, strict=True)) / 4
            heads.append(first @ z @ last @ v)
        y = torch.cat(heads, -1) @ m.o_proj.weight.T
        out = out.index_put(tuple(torch.tensor([(sample, *at) for at in places]).T), y)
    return out


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "grid, landmarks, pieces", [((11,), 4, 4), ((7, 5), 9, 3), ((3, 5, 4), 8, 2), ((4,), 9, 9)], ids=str
)
def test_against_boxes(close, close_grads, grid, landmarks, pieces, masked):
    """Odd sizes; boxes without tokens; more boxes than tokens."""
    m = NystromAttention(8, HEADS, landmarks=landmarks).double()
    x = 2 * torch.randn(3, *grid, 8, dtype=torch.float64)
    x.requires_grad_()
    mask = torch.ones(3, *grid, dtype=torch.bool)
    if masked:
        mask = torch.rand(3, *grid) < 0.4
        mask[0] = False
        mask[1, : grid[0] // 2] = False
    y = m(torch.where(mask[..., None], x, torch.nan), mask=mask if masked else None)
    expected = box_by_box(m, x, mask, pieces)
    close(y[mask], expected[mask], 1e-11)
    close_grads(y[mask], expected[mask], [x, *m.parameters()], 1e-10)


def test_the_inverse_of_a_matrix_with_empty_rows_and_of_nothing():
    a = (torch.randn(3, 9, 9, dtype=torch.float64) + 6 * torch.eye(9)).softmax(-1)
    a[1, :, 2:5] = a[1, 2:5] = a[2] = 0
    assert (inverse(a) - torch.linalg.pinv(a)).abs().max() < 1e-9


def test_a_landmark_for_each_token_gives_softmax_attention():
    m = NystromAttention(8, 1, landmarks=64).double()
    m.k_proj.load_state_dict(m.q_proj.state_dict())
    torch.nn.init.orthogonal_(m.q_proj.weight)
    x = 4 * torch.nn.init.orthogonal_(torch.empty(8, 8, dtype=torch.float64))[None]
    m.k_proj.load_state_dict(m.q_proj.state_dict())
    expected = m.o_proj(scaled_dot_product_attention(m.q_proj(x), m.k_proj(x), m.v_proj(x)))
    assert (m(x) - expected).abs().max() < 1e-9 * expected.abs().max()


def test_causal_is_refused():
    with pytest.raises(ValueError, match=r"^causal=True: NystromAttention has no causal form, expected causal=False$"):
        NystromAttention(8)(torch.randn(1, 5, 8), causal=True)
