"""The Grid algebra: every method against plain Python indexing, on random shapes."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ndlightnet import Grid
from ndlightnet.grid import per_axis

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple)
settings.register_profile("grid", deadline=None, max_examples=40)
settings.load_profile("grid")


def numbered(grid: Grid, batch: int = 2, dim: int = 3) -> torch.Tensor:
    """Tokens whose entries are all different."""
    shape = (batch, *grid.shape, dim)
    return torch.arange(math.prod(shape)).reshape(shape)


@given(shapes)
def test_length_and_ndim(shape):
    grid = Grid(shape)
    assert (grid.ndim, grid.length) == (len(shape), math.prod(shape))


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


@given(shapes)
def test_flatten_is_row_major_and_unflatten_its_inverse(shape):
    grid = Grid(shape)
    x = numbered(grid)
    flat = grid.flatten(x)
    assert flat.shape == (2, grid.length, 3)
    for row, place in enumerate(itertools.product(*map(range, shape))):
        assert torch.equal(flat[:, row], x[(slice(None), *place)])
    assert torch.equal(grid.unflatten(flat), x)


@given(shapes)
def test_flatten_takes_any_trailing_axes(shape):
    grid = Grid(shape)
    mask = numbered(grid, dim=1)[..., 0]
    assert torch.equal(grid.unflatten(grid.flatten(mask)), mask)
    heads = numbered(grid, dim=6).reshape(2, *shape, 2, 3)
    assert grid.flatten(heads).shape == (2, grid.length, 2, 3)
    assert torch.equal(grid.unflatten(grid.flatten(heads)), heads)


@given(shapes)
def test_coordinates_are_row_major(shape):
    expected = torch.tensor(list(itertools.product(*map(range, shape))))
    actual = Grid(shape).coordinates()
    assert actual.dtype == torch.int64 and torch.equal(actual, expected)


@given(shapes, st.data())
def test_spread_repeats_along_the_other_axes(shape, data):
    grid = Grid(shape)
    axis = data.draw(st.integers(0, grid.ndim - 1))
    values = torch.randn(shape[axis], 2)
    seen = grid.spread(values, axis)
    assert seen.shape == (*shape, 2)
    for place in itertools.product(*map(range, shape)):
        assert torch.equal(seen[place], values[place[axis]])


@given(shapes, st.data())
def test_lines_hold_one_line_each_and_unlines_is_the_inverse(shape, data):
    grid = Grid(shape)
    axis = data.draw(st.integers(0, grid.ndim - 1))
    x = numbered(grid)
    lines = grid.lines(x, axis)
    assert lines.shape == (2 * grid.length // shape[axis], shape[axis], 3)
    rest = [range(n) for a, n in enumerate(shape) if a != axis]
    for line, (sample, *others) in zip(lines, itertools.product(range(2), *rest), strict=True):
        place = [sample, *others]
        place.insert(1 + axis, slice(None))
        assert torch.equal(line, x[tuple(place)])
    assert torch.equal(grid.unlines(lines, axis), x)


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
