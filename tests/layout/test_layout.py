"""The layout algebra: every method of both kinds against plain Python indexing, on random shapes;
and what `pack` makes and refuses."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ndlightnet import Grid, NDLightNet, Packed, Ragged, pack
from ndlightnet.layout import Layout, cut_patches, per_axis
from ndlightnet.layout.abstract import exporting

SHAPES = ((3, 4, 5), (1, 2, 40), (6, 1, 4))

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple)
settings.register_profile("grid", deadline=None, max_examples=40)
settings.load_profile("grid")


def ragged(ndim: int):
    shape = st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim).map(tuple)
    return st.lists(shape, min_size=1, max_size=4).map(Ragged)


# both kinds, with the number of rows that a batch of them has
layouts = st.one_of(
    st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple).map(Grid), st.integers(1, 3)),
    st.tuples(st.integers(1, 3).flatmap(ragged), st.just(1)),
)


def drawn(layout: Layout, batch: int) -> torch.Tensor:
    """Tokens (batch, length, 2), all different."""
    return torch.arange(batch * layout.length * 2.0).reshape(batch, layout.length, 2)


def alone(layout: Layout, x: torch.Tensor) -> list[torch.Tensor]:
    """Each sample of tokens (batch, length, ...) on its own grid, (*grid, ...): by plain slices."""
    lengths = [math.prod(shape) for shape in layout.shapes]
    ends = list(itertools.accumulate(lengths))
    return [
        row[end - n : end].reshape(*shape, *x.shape[2:])
        for row in x
        for shape, n, end in zip(layout.shapes, lengths, ends, strict=True)
    ]


def joined(layout: Layout, samples: list[torch.Tensor]) -> torch.Tensor:
    """Inverse of `alone`."""
    flat = [sample.flatten(0, layout.ndim - 1) for sample in samples]
    return torch.stack(flat) if isinstance(layout, Grid) else torch.cat(flat)[None]


@given(layouts)
def test_tokens_and_masks_are_taken_flat_and_as_users_have_them(pair):
    layout, batch = pair
    x = drawn(layout, batch)
    assert layout.length == sum(math.prod(shape) for shape in layout.shapes)
    assert layout.samples(batch) == len(alone(layout, x))
    given = layout.unflatten(x)
    assert given.shape == ((batch, *layout.shape, 2) if isinstance(layout, Grid) else (layout.length, 2))
    assert torch.equal(layout.flatten(given), x) and torch.equal(given.flatten(), x.flatten())
    for form in (given, x):
        assert torch.equal(layout.tokens(form), x)
        mask = form[..., 0] > 3
        assert torch.equal(layout.flatten_mask(mask), x[..., 0] > 3)
        with pytest.raises(ValueError, match=r"mask .*float32: expected bool"):
            layout.flatten_mask(form[..., 0])
    assert layout.flatten_mask(None) is None
    longer = torch.cat([x, x[:, :1], x.new_zeros(batch, 1, 2)], 1)[:, : layout.length + 1]
    with pytest.raises(ValueError, match=rf"tokens of shape .*expected .*{type(layout).__name__}"):
        layout.tokens(longer)
    with pytest.raises(ValueError, match=r"mask .*bool: expected bool"):
        layout.flatten_mask(longer[..., 0] > 3)


@given(layouts)
def test_every_token_has_the_coordinates_of_its_sample(pair):
    layout, _ = pair
    expected = [place for shape in layout.shapes for place in itertools.product(*map(range, shape))]
    actual = layout.coordinates()
    assert actual.dtype == torch.int64 and actual.shape == (layout.length, layout.ndim)
    assert actual.tolist() == [list(place) for place in expected]


@given(layouts)
def test_functions_of_samples_see_each_grid_once(pair):
    """Samples of one shape at once; one that is alone in its shape is not copied."""
    layout, batch = pair
    x, seen = drawn(layout, batch), []
    address = x.untyped_storage().data_ptr()

    def add(grid: Grid, x: torch.Tensor, nothing: None) -> torch.Tensor:
        assert nothing is None and len(x) == batch * layout.shapes.count(grid.shape) and x.shape[1] == grid.length
        seen.append(grid.shape)
        copied = x.untyped_storage().data_ptr() != address
        assert x.numel() == 0 or copied == (layout.packed and len(x) > 1)
        return x + grid.coordinates().sum(-1)[:, None]

    y = layout.map_samples(add, x, None)
    assert seen == list(dict.fromkeys(layout.shapes))
    assert torch.equal(y, x + layout.coordinates().sum(-1)[:, None])


@given(layouts)
def test_values_of_samples_go_to_their_tokens(pair):
    layout, batch = pair
    values = torch.arange(layout.samples(batch) * 2.0).reshape(-1, 2)
    x = drawn(layout, batch)
    own = alone(layout, x + layout.spread_samples(values))
    for sample, plain, value in zip(own, alone(layout, x), values, strict=True):
        assert torch.equal(sample, plain + value)


@given(layouts, st.booleans())
def test_pool_is_the_mean_of_each_sample(pair, masked):
    layout, batch = pair
    x = torch.randn(batch, layout.length, 2, dtype=torch.float64)
    mask = torch.rand(batch, layout.length) < 0.5 if masked else None
    if mask is not None:
        x[~mask] = torch.nan
    pooled = layout.pool(x, mask)
    assert pooled.shape == (layout.samples(batch), 2) and pooled.dtype == x.dtype
    real = torch.ones(batch, layout.length, dtype=torch.bool) if mask is None else mask
    for mean, sample, keep in zip(pooled, alone(layout, x), alone(layout, real), strict=True):
        if keep.any():
            torch.testing.assert_close(mean, sample[keep].mean(0))
        elif masked or isinstance(layout, Ragged):
            assert not mean.any()


@given(layouts, st.data())
def test_functions_of_lines_see_every_line_of_every_sample(pair, data):
    layout, batch = pair
    axis = data.draw(st.integers(0, layout.ndim - 1))
    x = torch.randn(batch, layout.length, 2, dtype=torch.float64)
    sums = [sample.cumsum(axis) for sample in alone(layout, x)]
    actual = layout.map_lines(lambda lines: lines.cumsum(1), x, axis)
    torch.testing.assert_close(actual, joined(layout, sums))


def test_a_later_part_of_a_grid_has_an_offset_and_is_the_same_grid():
    grid = Grid((3, 4, 5))
    place = torch.tensor([7, 9])
    assert grid.offset is None and grid.after(6).offset == (6, 0, 0)
    assert grid.after(place).offset == (place, 0, 0) and grid.after(place) == grid
    assert hash(grid.after(place)) == hash(grid)


@given(shapes, st.integers(0, 3), st.integers(1, 3))
def test_of_reads_the_grid_of_tokens(shape, batch, dim):
    assert Grid.of(torch.empty(batch, *shape, dim)) == Grid(shape)


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
def test_of_refuses_tensors_without_an_axis(shape):
    with pytest.raises(ValueError, match="batch"):
        Grid.of(torch.empty(shape))


def test_grid_is_a_frozen_value():
    assert Grid((2, 3)) == Grid((2, 3)) != Grid((3, 2)) and hash(Grid((2, 3))) == hash(Grid((2, 3)))
    with pytest.raises(AttributeError):
        Grid((2, 3)).shape = (3, 2)


@given(shapes, st.data())
def test_spread_repeats_along_the_other_axes(shape, data):
    grid = Grid(shape)
    axis = data.draw(st.integers(0, grid.ndim - 1))
    values = torch.randn(shape[axis], 2)
    seen = grid.spread(values, axis)
    assert seen.shape == (*shape, 2)
    for place in itertools.product(*map(range, shape)):
        assert torch.equal(seen[place], values[place[axis]])


@given(st.integers(1, 9), st.integers(1, 5))
def test_per_axis_expands_and_keeps(value, ndim):
    assert per_axis("patch", value, ndim) == (value,) * ndim
    assert per_axis("patch", list(range(1, ndim + 1)), ndim) == tuple(range(1, ndim + 1))


def test_per_axis_least():
    assert per_axis("pad", (0, 2), 2, least=0) == (0, 2)


@pytest.mark.parametrize("value", [0, -1, (2,), (1, 2, 3), (1, 0), (1.0, 2), ("1", "2")], ids=repr)
def test_per_axis_errors_name_the_argument_and_show_the_value(value):
    with pytest.raises(ValueError, match=r"patch=.*expected") as caught:
        per_axis("patch", value, 2)
    assert repr(value) in str(caught.value)


def test_offsets_and_owners():
    layout = Ragged(SHAPES)
    assert (len(layout), layout.ndim, layout.length) == (3, 3, 60 + 80 + 24)
    assert layout.offsets == (0, 60, 140, 164) and layout.lengths == (60, 80, 24)
    sample_of_token = layout.sample_of_token(torch.device("cpu"))
    assert torch.equal(sample_of_token, torch.tensor([0] * 60 + [1] * 80 + [2] * 24))
    assert layout.sample_of_token(torch.device("cpu")) is sample_of_token  # made once


def test_lines_are_those_of_the_grids():
    """Every token is in one line along each axis, as Grid.lines has them."""
    layout = Ragged(SHAPES)
    x = torch.arange(layout.length)
    for axis in range(3):
        expected = {
            tuple(line[:, 0].tolist())
            for part, shape in zip(layout.split(x[:, None]), SHAPES, strict=True)
            for line in Grid(shape).lines(part, axis)
        }
        actual = set()
        for group in layout.lines(torch.device("cpu")):
            if group.axis == axis:
                assert group.longest & (group.longest - 1) == 0 and group.longest >= 16
                for first, step, n in group.table.tolist():
                    assert n <= group.longest and (n > group.longest // 2 or group.longest == 16)
                    actual.add(tuple(range(first, first + n * step, step)))
        assert actual == expected


@pytest.mark.parametrize("patch", [2, (1, 3, 2)])
def test_pack_cuts_every_sample_as_it_is_cut_alone(patch):
    samples = [torch.randn(2, 5, 4, 7), torch.randn(2, 1, 9, 2)]
    packed = pack(samples, patch)
    sizes = (patch,) * 3 if isinstance(patch, int) else patch
    for part, sample in zip(packed.unpack(), samples, strict=True):
        assert torch.equal(part, cut_patches(sample[None], sizes)[0])
    assert len(packed) == 2 and packed.to("cpu").layout is packed.layout


def test_words_and_nested_tensors():
    words = [torch.arange(3), torch.arange(5)]
    assert torch.equal(pack(words).values, torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]))
    nested = torch.nested.nested_tensor([torch.randn(3, 7, 2), torch.randn(3, 4, 5)])
    packed = pack(nested, 1)
    assert packed.layout.shapes == ((7, 2), (4, 5))


@pytest.mark.parametrize(
    "samples, patch, named",
    [
        ([], 1, r"samples=\[\]"),
        ([torch.randn(2, 3), torch.randn(1, 3)], 1, r"samples\[1\] \(1, 3\)"),
        ([torch.randn(2, 3), torch.randn(2, 3, 3)], 1, r"samples\[1\] \(2, 3, 3\)"),
        ([torch.zeros(2, 3, dtype=torch.long)], 1, r"samples\[0\].*int64: expected floats"),
        ([torch.randn(2, 3)], None, r"patch_size=None"),
        ([torch.randn(2, 3, 3)], (1, 2, 3), r"patch_size=\(1, 2, 3\)"),
    ],
)
def test_what_cannot_be_packed_is_named(samples, patch, named):
    with pytest.raises(ValueError, match=named):
        pack(samples, patch)


def test_a_network_names_what_does_not_fit():
    net = NDLightNet(2, 1, 3, patch_size=2, embed_dim=16, depth=1)
    with pytest.raises(ValueError, match=r"pack with the network's patch_size"):
        net(pack([torch.randn(1, 4, 4)], 1))
    with pytest.raises(ValueError, match=r"with 1 axes: expected .* with 2"):
        net(Packed(torch.randn(5, 4), Ragged([(5,)])))
    with pytest.raises(ValueError, match="mask"):
        net(net.pack([torch.randn(1, 4, 4)]), torch.ones(1, 4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="same number of axes"):
        Ragged([(3,), (3, 4)])


def test_exporting_is_not_compiling():
    """In every version of torch, in a function that is traced before an export and again after it."""

    class Shift(torch.nn.Module):
        def forward(self, x):
            return x + exporting()

    x = torch.zeros(2)
    for _ in range(2):
        assert not exporting() and not Shift()(x).any()
        assert not torch.compile(Shift(), fullgraph=True, backend="eager")(x).any()
        for strict in (False, True):
            assert torch.export.export(Shift(), (x,), strict=strict).module()(x).all()


@pytest.mark.parametrize("size", [(4, 6), (5, 7)])
def test_patches_are_cut_and_cast_at_once(size):
    x = torch.randn(2, 3, *size)
    cast = cut_patches(x, (2, 3), torch.bfloat16)
    assert cast.is_contiguous() and torch.equal(cast, cut_patches(x, (2, 3)).bfloat16())
