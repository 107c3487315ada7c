"""The blocks of a U-Net: what convolution blocks keep, free and refuse; separable blocks."""

import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import grad, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ndlightnet import NDLightUNet
from ndlightnet.layout import cut_patches, uncut_patches
from ndlightnet.nn import convolutional, slabs
from ndlightnet.nn.convolutional import ConvBlock, NormSiLU
from ndlightnet.nn.separable import LocalBlock
from ndlightnet.ops import instance_norm, recompute


def test_instance_norm_is_torchs(close):
    """Each sample and channel by itself, with torch's own where that takes the size."""
    norm, x = NormSiLU(5).double(), torch.randn(3, 5, 4, 6, dtype=torch.float64) * 3 + 7
    torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
    expected = nn.functional.instance_norm(x, weight=norm.weight, bias=norm.bias, eps=norm.eps)
    close(norm(x), nn.functional.silu(expected), 1e-12)
    close(norm(x, x), nn.functional.silu(expected + x), 1e-12)


def test_a_prediction_frees_what_it_has_used(close, monkeypatch):
    """The output of a second convolution is gone when the skip is computed; values of training."""
    model, x = NDLightUNet(2, 2, 3, widths=(8, 16, 24)).eval(), torch.randn(1, 2, 8, 8)
    outputs, freed, convolve = [], [], convolutional._convolve

    def noted(conv, y, *layout):
        if len(outputs) % 3 == 2:  # a block's skip, after its two convolutions
            freed.append(outputs[-1]() is None)
        y = convolve(conv, y, *layout)
        outputs.append(weakref.ref(y))
        return y

    monkeypatch.setattr(convolutional, "_convolve", noted)
    with torch.no_grad():
        y = model(x)
    assert freed and all(freed)
    freed.clear()
    close(model(x), y, 1e-5)
    assert not any(freed)


def test_a_prediction_calls_hooks():
    """As training does, with what the layers return: nothing is overwritten then."""
    block, outputs = ConvBlock(2, 3, 4), []
    layers = [block.conv1, block.norm1, block.conv2, block.norm2]
    for layer in layers:
        layer.register_forward_hook(lambda layer, _, output: outputs.append((layer, output)))
    with torch.no_grad():
        y = block(torch.randn(1, 3, 5, 6))
    assert [layer for layer, _ in outputs] == layers
    assert torch.equal(outputs[1][1], block.norm1(outputs[0][1])) and outputs[3][1] is y


def test_a_block_keeps_what_its_convolutions_return(close):
    """What is normalised between them is computed again, unless others say what is kept."""
    block, x = ConvBlock(2, 3, 4).double(), torch.randn(2, 3, 5, 6, dtype=torch.float64)
    normed, x = [], x.requires_grad_()
    block.norm1.register_forward_hook(lambda _, __, output: normed.append(weakref.ref(output)))
    y = block(x)
    assert normed[-1]() is None
    with saved_tensors_hooks(lambda saved: saved, lambda packed: packed):
        stored = block(x)
    assert normed[-1]() is not None
    both = (grad(out.square().sum(), [x, *block.parameters()]) for out in (y, stored))
    for one, two in zip(*both, strict=True):
        close(one, two, 1e-12)


class Storages(TorchDispatchMode):
    """All storages that operators make."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self, least):
        return sum(size for storage, size in self.made.values() if size >= least and not storage.expired())


@pytest.mark.parametrize("size, maps", [("hybrid", 5), ("M", 6)])
def test_bytes_a_voxel_that_a_step_keeps(size, maps):
    """Of the first level what four convolutions return and the decoder's input (M: of twice the width), of the
    second the input of its block and what two convolutions return; the input twice in 16 bits, and the output."""
    net, x = NDLightUNet(3, 1, 3, size=size, widths=(8, 16), convs=(1, 1), depths=(0, 0)), torch.randn(1, 1, 32, 32, 32)
    with Storages() as storages, torch.autocast("cpu", torch.bfloat16):
        y = net(x)
    voxels = x.numel()
    assert storages.alive(least=2 * voxels) == 2 * voxels * (8 * maps + 3 * 16 // 8 + 2 + y.shape[1])


@pytest.mark.parametrize("inputs", [3, 4])
@pytest.mark.parametrize("reader", ["Conv2d", "ConvTranspose2d"])
def test_the_reader_of_a_block_keeps_none_of_its_output(reader, inputs, close):
    """Nor the block what its convolution of kernel size 1 returns; also where the block is checkpointed."""
    block, read = ConvBlock(2, inputs, 4).double(), getattr(slabs, reader)(4, 5, 2, stride=2).double()
    x = torch.randn(2, inputs, 6, 4, dtype=torch.float64, requires_grad=True)
    sources, results = [x, *block.parameters(), *read.parameters()], []
    for block.grad_checkpointing in (False, True):
        with Storages() as storages:
            y = block(x)
            z = read(y)
            output = y.untyped_storage()._cdata
            del y
        assert storages.made[output][0].expired() != block.grad_checkpointing
        results.append(grad(z.square().sum(), sources))
    with saved_tensors_hooks(lambda saved: saved, lambda packed: packed):
        expected = grad(read(block(x)).square().sum(), sources)
    for result in results:
        for one, two in zip(result, expected, strict=True):
            close(one, two, 1e-12)


def test_a_long_chain_of_residuals_is_not_computed_again_for_each_block(monkeypatch, close):
    calls, again = [], instance_norm._torch_again
    monkeypatch.setattr(instance_norm, "_torch_again", lambda node: calls.append(1) or again(node))
    blocks = nn.Sequential(*[ConvBlock(2, 3, 3) for _ in range(15)]).double()
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64, requires_grad=True)
    results = grad(blocks(x).square().sum(), [x, *blocks.parameters()])
    assert 0 < len(calls) <= 15 * 2 * (1 + recompute.MOST)
    with saved_tensors_hooks(lambda saved: saved, lambda packed: packed):
        expected = grad(blocks(x).square().sum(), [x, *blocks.parameters()])
    for one, two in zip(results, expected, strict=True):
        close(one, two, 1e-12)


@pytest.mark.filterwarnings("error")
def test_blocks_of_tensors_without_numbers():
    """To count what a step needs."""
    with FakeTensorMode():
        blocks, x = nn.Sequential(ConvBlock(2, 3, 4), ConvBlock(2, 4, 4)), torch.randn(2, 3, 6, 5)
        blocks(x).sum().backward()
        assert all(p.grad.shape == p.shape for p in blocks.parameters())


def test_a_change_between_forward_and_backward_is_refused():
    """As torch refuses it of what it keeps itself."""
    block, x = ConvBlock(2, 3, 4), torch.randn(2, 3, 5, 6, requires_grad=True)
    for parameter in (block.conv2.weight, block.norm1.weight):
        y = block(x)
        with torch.no_grad():
            parameter.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_hooks_that_are_forbidden_are_not_needed():
    block, x = ConvBlock(2, 3, 4), torch.randn(2, 3, 5, 6)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        block(x).sum().backward()
    assert block.conv1.weight.grad.any()


def test_second_derivatives_of_a_block():
    block, x = ConvBlock(1, 2, 2).double(), torch.randn(1, 2, 4, dtype=torch.float64)
    assert gradgradcheck(lambda x, *_: block(x), (x.requires_grad_(), *block.parameters()))


def test_a_block_is_a_separable_convolution(close):
    """In two axes torch has one: the taps of the star in a kernel of 3 x 3."""
    block, x = LocalBlock(2, 6).double(), torch.randn(2, 5, 7, 6, dtype=torch.float64)
    kernel = torch.zeros(6, 1, 3, 3, dtype=torch.float64)
    for offset, weight in zip(block.local.offsets(False), block.local.weight, strict=True):
        kernel[:, 0, 1 - offset[0], 1 - offset[1]] = weight
    local = nn.functional.conv2d(block.norm(x).movedim(-1, 1), kernel, padding=1, groups=6)
    close(block(x), x + block.mlp(local.movedim(1, -1)), 1e-12)


@pytest.mark.parametrize("space", [(13,), (9, 14), (3, 5, 4, 6)], ids=str)
def test_patches_are_laid_out_as_they_were_cut(space):
    x = torch.randn(2, 3, *[2 * n for n in space])
    step = (1, 2, 1, 2)[: len(space)]
    assert torch.equal(uncut_patches(cut_patches(x, step), step), x.movedim(1, -1))
