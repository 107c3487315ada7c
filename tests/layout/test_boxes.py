"""Boxes: parts of samples whose memories merge, so that what is dropped is not computed."""

from unittest.mock import Mock

import pytest
import torch

from ndlightnet import NDLightNet
from ndlightnet.layout import Boxed, Boxes, Grid, cut_patches, draw_boxes
from ndlightnet.nn.mixers import GLA, Identity, LightNetAttention, SoftmaxAttention, WithLocal
from ndlightnet.ops import Position, global_attention
from ndlightnet.ops.lightnet.state import State

# patch, box, boxes along each axis
SHAPES = {
    1: ((2,), (3,), (5,)),
    2: ((2, 3), (2, 1), (3, 4)),
    3: ((1, 2, 2), (2, 1, 3), (2, 3, 2)),
    4: ((1, 1, 2, 1), (1, 2, 1, 2), (2, 2, 3, 1)),
}
every_dims = pytest.mark.parametrize("dims", SHAPES)


def cells(dims, batch=2, channels=2, dtype=torch.float64):
    torch.manual_seed(0)
    patch, box, boxes = SHAPES[dims]
    space = [p * b * n for p, b, n in zip(patch, box, boxes, strict=True)]
    return torch.randn(batch, channels, *space, dtype=dtype)


def network(dims, **options):
    torch.manual_seed(1)
    sizes = {"patch_size": SHAPES[dims][0], "embed_dim": 24, "depth": 2, "num_classes": 3}
    return NDLightNet(dims, 2, **sizes | options).double()


def plain(dim):
    """The mixer without a look at neighbours, which a box cuts off."""
    return LightNetAttention(dim, heads=4, local=None)


@every_dims
def test_kept_boxes_are_those_of_the_sample(dims):
    x, (patch, box, boxes) = cells(dims), SHAPES[dims]
    kept = draw_boxes(x, patch, box, 0.7)
    count = max(1, round(0.3 * Grid(boxes).length))
    assert kept.numbers.shape == (2, count) and kept.layout.count == count
    assert (kept.numbers.diff(dim=1) > 0).all()
    patches = cut_patches(x, patch)
    tokens = cut_patches(kept.values, patch).flatten(1, dims)  # (rows, length, cells)
    at = Grid(box).coordinates()
    for row in range(2 * count):
        corner = torch.stack([first[row] for first in kept.layout.offset])
        for token, place in zip(tokens[row], at + corner, strict=True):
            assert torch.equal(token, patches[(row // count, *place)])


@every_dims
def test_spread_puts_them_back(dims):
    x, (patch, box, _) = cells(dims), SHAPES[dims]
    kept, patches = draw_boxes(x, patch, box, 0.5), cut_patches(cells(dims), patch)
    fill = torch.full((patches.shape[-1],), 7.0, dtype=x.dtype)
    whole = kept.spread(cut_patches(kept.values, patch).flatten(1, dims), fill)
    absent = kept.absent()
    assert absent.shape == patches.shape[:-1] and whole.shape == patches.shape
    assert torch.equal(whole[~absent], patches[~absent]) and (whole[absent] == 7).all()
    assert (~absent).flatten(1).sum(1).tolist() == [kept.layout.count * kept.layout.length] * 2


def test_draws_differ_from_sample_to_sample_and_follow_the_generator():
    x = cells(2, batch=8)
    first, same, other = (draw_boxes(x, *SHAPES[2][:2], 0.5, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(first.numbers, same.numbers)
    assert not torch.equal(first.numbers, other.numbers)
    assert len({tuple(row) for row in first.numbers.tolist()}) > 3
    seen = torch.bincount(
        torch.cat([draw_boxes(x, *SHAPES[2][:2], 0.5).numbers.flatten() for _ in range(40)]), minlength=12
    )
    assert seen.min() > 0.75 * seen.float().mean()  # each box as often


@pytest.mark.parametrize("dropped, count", [(0.75, 3), (0.9, 1), (0.999, 1), (0.001, 11), (0.5, 6)])
def test_one_box_stays_and_one_is_dropped(dropped, count):
    assert draw_boxes(cells(2), *SHAPES[2][:2], dropped).layout.count == count


@pytest.mark.parametrize("dropped", [0.0, 1.0, -0.1])
def test_wrong_fractions(dropped):
    with pytest.raises(ValueError, match=r"of 12 boxes: expected a fraction between 0 and 1"):
        draw_boxes(cells(2), *SHAPES[2][:2], dropped)


def test_wrong_sizes():
    with pytest.raises(ValueError, match=r"samples of \(9, 4\): expected multiples of \(4, 2\)"):
        draw_boxes(torch.randn(1, 1, 9, 4), (2, 2), (2, 1), 0.5)
    with pytest.raises(ValueError, match="of 1 boxes"):
        draw_boxes(torch.randn(1, 1, 4, 2), (2, 2), (2, 1), 0.5)
    with pytest.raises(ValueError, match="box=0"):
        draw_boxes(torch.randn(1, 1, 4, 2), (2, 2), 0, 0.5)


@pytest.mark.parametrize("tokens, merged", [(3, False), (7, False), (8, True), (40, True)])
def test_both_ways_to_join_boxes_agree(tokens, merged, monkeypatch):
    """States of boxes of as many tokens as they have rows (8) are merged, tokens of smaller ones
    are joined; masks in both."""
    spied = Mock(wraps=State.merged)
    monkeypatch.setattr(State, "merged", lambda *states: spied(*states))
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 6, tokens, 2, 4, dtype=torch.float64).unbind(0)
    mask = torch.rand(6, tokens) > 0.3
    layout = Boxes((tokens,), (torch.tensor([0, 50, 100, 0, 150, 200]),), 3)
    lrpe = Position(torch.rand(2, 4, dtype=torch.float64), layout)
    ways = [
        global_attention(
            q, k.masked_fill(~mask[..., None, None], torch.nan), v, mask=mask, position=lrpe, layout=layout, impl=impl
        )
        for impl in ("torch", "reference")
    ]
    torch.testing.assert_close(*ways)
    assert ways[0].isfinite().all()
    assert spied.call_count == 1 + merged  # the reference always merges


def test_one_box_a_sample_is_a_grid_with_an_offset():
    q, k, v = torch.randn(3, 4, 6, 2, 8).unbind(0)
    torch.testing.assert_close(global_attention(q, k, v, layout=Boxes((6,), None, 1)), global_attention(q, k, v))


@every_dims
def test_a_network_on_boxes_is_that_on_the_masked_grid(dims):
    x, (patch, box, _) = cells(dims), SHAPES[dims]
    kept, model = draw_boxes(x, patch, box, 0.5), network(dims, mixer=plain, tpe=False)
    visible = ~kept.absent()
    mask = visible
    for axis, size in enumerate(patch):
        mask = mask.repeat_interleave(size, 1 + axis)
    expected = model.forward_features(x, mask)
    actual = kept.spread(model.forward_features(kept).flatten(1, dims), torch.zeros(24))
    torch.testing.assert_close(actual[visible], expected[visible])


@every_dims
def test_mdtpe_and_local_mixing_stay_within_a_box(dims):
    """A cell of one box changes another box through the attention only."""
    x, (patch, box, _) = cells(dims), SHAPES[dims]
    kept = draw_boxes(x, patch, box, 0.5)
    local = network(dims, mixer=lambda dim, dims: WithLocal(dim, Identity, dims=dims))
    values = kept.values.clone()
    values[0] += 1
    changed = local.forward_features(Boxed(values, kept.layout, kept.numbers, kept.boxes))
    same = local.forward_features(kept)
    assert torch.equal(changed[1:], same[1:]) and not torch.equal(changed[0], same[0])
    mixing = network(dims)
    changed = mixing.forward_features(Boxed(values, kept.layout, kept.numbers, kept.boxes))
    same, count = mixing.forward_features(kept), kept.layout.count
    assert (changed[:count] != same[:count]).flatten(1).any(1).all()
    assert torch.equal(changed[count:], same[count:])  # of the other sample


def test_behind_convolutions():
    x = torch.randn(2, 2, 16, 24)
    model = NDLightNet(2, 2, patch_size=4, embed_dim=16, depth=1, stem_blocks=1, num_classes=0)
    kept = draw_boxes(x, (4, 4), (2, 1), 0.5)
    assert model.forward_features(kept).shape == (2 * kept.layout.count, 2, 1, 16)


def test_what_a_network_does_not_do_with_boxes():
    """Each would give other numbers than those of whole samples, without a word."""
    model, x = network(2), cells(2)
    patch, box, _ = SHAPES[2]
    kept = draw_boxes(x, patch, box, 0.5)
    with pytest.raises(ValueError, match="mask: expected none with boxes"):
        model.forward_features(kept, torch.ones(2, *x.shape[2:], dtype=torch.bool))
    with pytest.raises(ValueError, match="causal=True: expected none with boxes"):
        network(2, causal=True).forward_features(kept)
    with pytest.raises(ValueError, match="boxes: expected whole samples"):
        model(kept)
    for other in (
        NDLightNet(2, 3, patch_size=patch, embed_dim=24, depth=1).double(),
        NDLightNet(2, 2, patch_size=4, embed_dim=24, depth=1).double(),
    ):
        with pytest.raises(ValueError, match=r"boxes of cells .*: expected \(in_chans="):
            other.forward_features(kept)
    with pytest.raises(ValueError, match="expected whole samples in a causal form"):
        LightNetAttention(24)(torch.randn(4, 6, 24), layout=Boxes((2, 3), (0, 0), 2), causal=True)


@pytest.mark.parametrize("mixer", [SoftmaxAttention, GLA])
def test_mixers_that_need_whole_samples_say_so(mixer):
    layout = Boxes((2, 3), (0, 0), 2)
    with pytest.raises(ValueError, match=f"{mixer.__name__} takes whole samples; expected a mixer"):
        mixer(24)(torch.randn(4, 6, 24), layout=layout)
    assert mixer(24)(torch.randn(4, 6, 24), layout=Boxes((2, 3), (0, 0), 1)).shape == (4, 6, 24)


def test_prefix_tokens_need_whole_samples():
    with pytest.raises(ValueError, match="prefix=1: expected causal=False and a Grid of whole samples"):
        LightNetAttention(24).mix(torch.randn(4, 7, 24), Boxes((2, 3), (0, 0), 2), None, False, 1)
