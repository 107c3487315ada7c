"""Copies in numbers of 16 bytes, and sums by a kernel, are torch's."""

import numpy as np
import pytest
import torch

from ndlightnet.parallel import copies, exchange
from ndlightnet_kernels import planes


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(copies, "DEVICES", ("cpu", "cuda"))


def rows(dtype, *shape):
    x = torch.randint(-9, 9, shape) if dtype in (torch.bool, torch.int64) else torch.randn(shape)
    return x.to(dtype)


DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first, last", [(0, 64), (16, 48), (5, 64), (0, 33), (7, 7)])
def test_copy(dtype, first, last):
    x = rows(dtype, 3, 5, 64)[:, 1:4, first:last]
    aligned = first % 16 == 0 and last % 16 == 0
    assert copies._wide(x)[0].is_complex() == aligned
    place = torch.zeros_like(x, memory_format=torch.contiguous_format)
    copies.copy(x, place)
    assert torch.equal(place, x)
    copies.copy(torch.zeros(()), torch.ones(()))


@pytest.mark.parametrize("dtype, kernel", [(torch.bfloat16, True), (torch.float32, True), (torch.float64, False)])
@pytest.mark.parametrize("dim, permuted", [(1, False), (2, False), (1, True), (2, True)])
def test_add(dtype, kernel, dim, permuted, monkeypatch):
    """Of the edge of a grid along an axis, some channels of it. Axes in another order have no rows at one distance."""
    calls, add = [], planes.add
    monkeypatch.setattr(planes, "add", lambda *xs: (calls.append(xs), add(*xs)))
    larger, x = rows(dtype, 2, 4, 3, 5, 12), rows(dtype, 2, 4, 3, 5, 12)[..., :4].narrow(dim, 0, 2)
    if permuted:
        larger = larger.transpose(2, 3).contiguous().transpose(2, 3)
    expected = larger.clone()
    expected[..., 4:8].narrow(dim, 1, 2).add_(x)
    with torch.no_grad():
        copies.add(x, larger[..., 4:8].narrow(dim, 1, 2), dim)
    rtol = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0  # the interpreter rounds it otherwise
    torch.testing.assert_close(larger, expected, rtol=rtol, atol=0)
    assert bool(calls) == (kernel and not permuted)
    copies.add(x[:0], larger[:0, ..., 4:8].narrow(dim, 1, 2), dim)
    calls.clear()
    copies.add(x, larger[..., 4:8].narrow(dim, 1, 2), dim)
    assert not calls  # of which autograd would know nothing


@pytest.mark.parametrize("start, wide", [(0, True), (4, False)])
def test_addresses_of_wide_numbers_are_multiples_of_16_bytes(start, wide):
    """A GPU refuses others, which a tensor in memory of another library may have; a CPU takes them."""
    memory = np.zeros(272, np.uint8)
    start += -memory.ctypes.data % 16
    x = torch.from_numpy(memory[start : start + 256].view(np.float32))
    assert x.storage_offset() == 0 and copies._wide(x)[0].is_complex() == wide


def split(x, sizes, dim, batches):
    return [part.split(sizes, dim) for part in x.split(batches)]


def cat(parts, dim):
    return torch.cat([torch.cat(xs, dim) for xs in parts])


@pytest.mark.parametrize("sizes", [(32, 32), (16, 48), (13, 51), (0, 64)])
@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("batches", [(3,), (1, 2)])
def test_split_and_cat(sizes, dim, batches, close_grads):
    x, y = (rows(torch.float64, 3, 64, 64).requires_grad_() for _ in range(2))

    def both(split, cat):
        return cat(
            [
                [second, z, first.sin()]
                for (first, second), z in zip(split(x * 2, sizes, dim, batches), y.split(batches), strict=True)
            ],
            dim,
        )

    ours, theirs = both(copies.split, copies.cat), both(split, cat)
    assert torch.equal(ours, theirs)
    close_grads(ours, theirs, [x, y], 1e-15)
    assert torch.autograd.gradgradcheck(
        lambda x: copies.cat(copies.split(x * x, (1, 2), 1, (1, 1)), 1), rows(torch.float64, 2, 3).requires_grad_()
    )


def test_what_is_sent_without_a_copy():
    shapes = [(2, 3), (0, 3), (4,)]
    parts = exchange.in_a_row(torch.zeros(1, dtype=torch.float16), shapes)
    assert [x.shape for x in parts] == shapes and parts[0].dtype == torch.float16
    for i, x in enumerate(parts):
        x.fill_(i)
    numbers = torch.tensor([0.0] * 6 + [2.0] * 4, dtype=torch.float16)
    assert torch.equal(exchange._joined(parts), numbers)
    assert exchange._joined(parts).data_ptr() == parts[0].data_ptr()
    for others in (parts[::-1], [x.clone() for x in parts], [parts[0].mT.clone().mT, parts[2]]):
        joined = exchange._joined(others)
        assert torch.equal(joined, torch.cat([x.flatten() for x in others]))
        assert joined.data_ptr() not in [x.data_ptr() for x in others]
