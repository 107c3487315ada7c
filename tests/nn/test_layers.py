"""Layers around the mixers: blocks, patches, position codes; softmax attention is its formula."""

import itertools
import math

import pytest
import torch
from torch.autograd import grad

from ndlightnet import Grid
from ndlightnet.nn import GLU, MDLRPE, MDTPE, Block, DropPath, LightNetAttention, Patchify, mixers
from ndlightnet.ops import line_scan

GRIDS = ((7,), (3, 4, 5), (2, 3, 2, 4))
DIM = 128  # two heads of 64 by default
grids = pytest.mark.parametrize("shape", GRIDS, ids=str)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(9,), (3, 4)], ids=str)
def test_softmax_attention_is_its_formula(close, causal, shape):
    """Pairs (j, j + 4) of queries and keys turn; two axes share the four angles of a head."""
    m, x = mixers.SoftmaxAttention(16, 2).double(), torch.randn(2, *shape, 16).double()
    place = torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).double()
    width = 4 // len(shape)
    bank = 10000.0 ** (-2 * torch.arange(width).double() / width)
    angle = (place[:, :, None] * bank).flatten(1)[None, :, None]
    q, k, v = (proj(x.flatten(1, -2)).unflatten(-1, (2, 8)) for proj in (m.q_proj, m.k_proj, m.v_proj))
    q, k = (torch.complex(t[..., :4], t[..., 4:]) * torch.polar(angle**0, angle) for t in (q, k))
    score = torch.einsum("bthd,bshd->bhts", q, k.conj()).real / 8**0.5
    if causal:
        score = score.masked_fill(place[:, None, 0] < place[:, 0], -torch.inf)
    y = torch.einsum("bhts,bshd->bthd", score.softmax(-1), v).flatten(2)
    close(m(x, causal=causal), m.o_proj(y).reshape(x.shape), 1e-5)  # frequencies are float32


def test_block_is_the_residual_pair(close):
    block, x = Block(DIM, LightNetAttention), torch.randn(2, 4, 6, DIM)
    for options in ({"mask": torch.rand(2, 4, 6) < 0.7}, {"causal": True}):
        y = x + block.mixer(block.norm1(x), **options)
        close(block(x, **options), y + block.mlp(block.norm2(y)), 1e-6)


@pytest.mark.parametrize("dim, hidden", [(192, 512), (768, 2048), (128, 344), (8, 24), (1, 8)])
def test_glu(close, dim, hidden):
    glu, x = GLU(dim), torch.randn(2, 3, dim)
    assert sum(p.numel() for p in glu.parameters()) == 3 * dim * hidden
    gate, up = x @ glu.gate_proj.weight.T, x @ glu.up_proj.weight.T
    close(glu(x), (gate * gate.sigmoid() * up) @ glu.down_proj.weight.T, 1e-6)


def test_drop_path():
    drop, x = DropPath(0.3), torch.ones(20000, 2, 3)
    y = drop(x)
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}  # kept or dropped,
    assert (y == y[:, :1, :1]).all()  # a whole sample at a time,
    assert abs(y.mean() - 1) < 0.02  # 4 standard deviations: sqrt(0.3 / 0.7 / 20000) = 0.0046
    assert torch.equal(drop.eval()(x), x)
    assert torch.equal(DropPath(0.0)(x), x)


@grids
def test_patchify_against_manual_patches(close, shape):
    """Patch 2 x 3 x 2 x 3 on sizes that it does not divide: zeros at the end, channels last."""
    dims = len(shape)
    patch = (2, 3, 2, 3)[:dims]
    module, x = Patchify(dims, 2, patch, 5), torch.randn(3, 2, *shape)
    sizes = [math.ceil(n / p) for n, p in zip(shape, patch, strict=True)]
    padded = torch.zeros(3, 2, *[n * p for n, p in zip(sizes, patch, strict=True)])
    padded[(slice(None), slice(None), *map(slice, shape))] = x
    tokens, rows = module(x), module.cut(x)
    assert tokens.shape == (3, *sizes, 5)
    for place in torch.cartesian_prod(*map(torch.arange, sizes)).reshape(-1, dims).tolist():
        cells = [slice(i * p, (i + 1) * p) for i, p in zip(place, patch, strict=True)]
        row = padded[(slice(None), slice(None), *cells)].movedim(1, -1).flatten(1)
        at = (slice(None), *place)
        assert torch.equal(rows[at], row)
        close(tokens[at], row @ module.proj.weight.T + module.proj.bias, 1e-5)


def test_patchify_masks_keep_a_token_with_any_real_cell():
    module, mask = Patchify(2, 3, (2, 3), 4), torch.zeros(1, 5, 7, dtype=torch.bool)
    mask[0, 1, 2] = mask[0, 4, 6] = True
    tokens = module.cut_mask(mask)
    assert tokens.dtype == torch.bool and tokens.shape == (1, 3, 3)
    assert tokens[0].nonzero().tolist() == [[0, 0], [2, 2]]


@grids
@pytest.mark.parametrize("causal", [False, True])
def test_mdtpe_adds_a_line_product_per_axis_and_way(close, shape, causal):
    """lag 0 of the way back is not counted: a token sees itself once (maths.md 7.5)."""
    dims, dim = len(shape), 6
    tpe, x = MDTPE(dims, dim, 8, causal=causal), torch.randn(2, *shape, dim)
    returning = range(causal, dims)  # the axes that are gone back
    states = 4 if returning else 8
    count = sum(p.numel() for p in tpe.parameters())
    assert count == (dims + len(returning)) * states * (dim + 1)
    forth, back = tpe.weights()
    assert (forth[1] < 0).all() and forth[0].shape == (dims, dim, states)
    assert (back is None) == (not returning)
    expected = x
    for axis in range(dims):
        lines = x.movedim(1 + axis, -2)
        flat = lines.flatten(0, -3)
        y = line_scan(flat, forth[0][axis], forth[1][axis])
        if axis in returning:
            coef, log_decay = (w[returning.index(axis)] for w in back)
            y = y + line_scan(flat.flip(1), coef, log_decay).flip(1) - flat * coef.sum(-1)
        expected = expected + y.reshape(lines.shape).movedim(-2, 1 + axis)
    close(tpe(x), expected, 1e-5)
    for g in grad(tpe(x).square().sum(), list(tpe.parameters())):
        assert g.isfinite().all() and g.any()


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_the_published_mdtpe_is_its_double_sum_in_place_of_the_tokens(close, close_grads, shape, causal):
    """y_n = sum over axes of the tokens m <= n on its line, times sum_t c_t (1 - lambda_t) lambda_t^(n - m)."""
    tpe = MDTPE(len(shape), 5, 3, published=True, causal=causal).double()
    x, mask = torch.randn(2, *shape, 5, dtype=torch.float64, requires_grad=True), torch.rand(2, *shape) < 0.7

    def read(x, n):
        y = 0
        for axis, last in enumerate(n):
            decay = tpe.logit[axis].sigmoid()
            for m in range(last + 1):
                weight = (tpe.coef[axis] * (1 - decay) * decay ** (last - m)).sum(-1)
                y = y + weight * x[(slice(None), *n[:axis], m, *n[axis + 1 :])]
        return y

    for keep in (None, mask):
        source = x if keep is None else x * keep[..., None]
        expected = torch.stack([read(source, n) for n in itertools.product(*map(range, shape))], 1).reshape(x.shape)
        close(tpe(x, keep), expected, 1e-11)
        close_grads(tpe(x, keep), expected, (x, *tpe.parameters()), 1e-10)
    assert sum(p.numel() for p in tpe.parameters()) == len(shape) * 3 * (5 + 1)


@pytest.mark.parametrize("shape", [*GRIDS, (70,)], ids=str)
@pytest.mark.parametrize("options", [{"causal": True}, {"published": True}], ids=str)
@pytest.mark.parametrize("chunk", [1, 2, 65])
def test_mdtpe_in_chunks_is_the_whole(close, shape, options, chunk):
    tpe, x = MDTPE(len(shape), 6, 8, **options), torch.randn(2, *shape, 6)
    state, outputs = tpe.init_state(2, shape[1:]), []
    size = state.shape
    for piece in x.split(chunk, 1):
        y, state = tpe.advance(piece, state)
        outputs.append(y)
    close(torch.cat(outputs, 1), tpe(x), 1e-5)
    assert state.shape == size


def test_mdtpe_with_padding_on_the_left_is_the_rest_alone(close):
    tpe, x = MDTPE(1, 6, 8, causal=True), torch.randn(2, 70, 6)
    mask = torch.arange(70) > torch.tensor([[20], [-1]])
    close(tpe(x, mask)[0, 21:], tpe(x[:1, 21:])[0], 1e-5)


def test_mdtpe_advances_only_in_the_causal_form():
    for dims in (1, 2):  # it sees later frames
        with pytest.raises(ValueError, match=r"advance.*causal=True"):
            tpe = MDTPE(dims, 6, 8)
            tpe.advance(torch.randn(2, 3, *[4] * (dims - 1), 6), tpe.init_state(2))
    MDTPE(1, 6, 3, causal=True)


def test_mdlrpe_learns_a_factor_and_refuses_too_many_axes():
    code = MDLRPE(2, 8, "rotary")
    assert sum(p.numel() for p in code.parameters() if p.requires_grad) == 2 * 4
    assert not any(p.requires_grad for p in MDLRPE(2, 8, "rotary", learn=False).parameters())
    position = code(Grid((3, 4), (7, 9)))
    assert (position.shape, position.kind) == ((3, 4), "rotary")
    assert position.layout.offset == (7, 9)
    code.log_factor.data += math.log(2)
    assert torch.allclose(code((3, 4)).theta, 2 * position.theta)
    with pytest.raises(ValueError, match=r"5 axes .* 4"):
        code((2, 2, 2, 2, 2))
