"""Plans made once for a call's shapes, and launches that keep their programs."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ndlightnet.ops import global_attention
from ndlightnet_kernels import launch, tiles

from .kernel_cases import DEVICE


class Kernel:
    """In the place of a compiled kernel: counts how often Triton looks at all arguments."""

    arg_names = ("x", "y", "n", "BLOCK")

    def __init__(self) -> None:
        self.looked, self.launched = [], []

    def __getitem__(self, grid):
        assert grid == (5, 1, 1)

        def run(*arguments, **options):
            assert options == {"num_warps": 2}
            self.looked.append(arguments)
            return Program(self)

        return run


class Program:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        assert grid == (5, 1, 1)
        return lambda *arguments: self.kernel.launched.append(arguments)


def test_a_program_is_looked_for_once_for_each_alignment(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    kernel, x = Kernel(), torch.zeros(8)
    run = launch.Launch(kernel, (5,), num_warps=2, BLOCK=16, n=3)
    odd = torch.zeros(9)[1:]
    assert x.data_ptr() % 16 == 0 and odd.data_ptr() % 16 == 4
    for tensors in ((x, None), (x, None), (odd, None), (odd, None), (x, x), (x, None)):
        run(*tensors)
    assert [len(calls) for calls in (kernel.looked, kernel.launched)] == [3, 3]
    assert all(call[2:] == (3, 16) for call in (*kernel.looked, *kernel.launched))


def test_plans_are_made_once_and_do_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(launch, "MOST", 3)
    made = []
    for key in (1, 2, 1, 3, 2, 4, 4):  # the fourth key empties the store
        assert launch.remembered(key, lambda key=key: made.append(key) or [key]) == [key]
    assert made == [1, 2, 3, 4] and len(launch._plans) == 1


@pytest.mark.slow
def test_shapes_strides_and_masks_have_plans_of_their_own(close):
    """The same sizes in other strides, dtypes and kinds, one after the other and again."""
    wide = torch.randn(2, 8, 1, 12, device=DEVICE)
    for _ in range(2):
        for x in (wide[..., :6], wide[..., :6].contiguous(), wide[..., ::2], wide[..., 6:].half()):
            for mask in (None, torch.arange(8, device=DEVICE).expand(2, 8) < 5):
                how = {"mask": mask, "impl": "triton"}
                exact = global_attention(*[x.double()] * 3, mask=mask)
                close(global_attention(x, x, x, **how).double(), exact, 2e-3)


@pytest.mark.parametrize(("rows", "parts"), [(64, 1), (2, 4)])
def test_a_length_that_is_a_symbol_is_cut_as_at_its_example(rows, parts):
    """One part is a number: AOTInductor of torch 2.11 cannot order a merge of parts whose symbolic
    number is always 1."""
    fake = FakeTensorMode(shape_env=ShapeEnv())
    length = fake.from_tensor(
        torch.empty(1024, 3), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2)
    ).shape[0]
    assert isinstance(length, torch.SymInt)
    found, span = tiles.plan_splits(length, rows, 64, 64)
    assert isinstance(found, int) == (parts == 1)
    assert (int(found), int(span)) == tiles.plan_splits(1024, rows, 64, 64) == (parts, 1024 // parts)
