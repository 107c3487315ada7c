"""A block as on a GPU in training, its kernels interpreted: the same results, and what it keeps for the backward."""

from importlib import import_module

import pytest
import torch
from torch.autograd import grad

from ndlightnet.layout import Ragged
from ndlightnet.models import NDLightNet, backbone
from ndlightnet.nn import block as blocks
from ndlightnet.nn import projections
from ndlightnet.nn.block import Block
from ndlightnet.nn.mixers import GLA, LightNetAttention
from ndlightnet.nn.projections import exact_norm

from .kernel_cases import BRAIN, DEVICE

DIM, HEADS, HIDDEN = 24, 2, 64


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Products are joined, and operators run on kernels."""
    lightnet = import_module("ndlightnet.nn.mixers.lightnet")
    for module in (projections, blocks, lightnet, backbone):
        monkeypatch.setattr(module, "joins", lambda x, *layers: torch.is_grad_enabled(), raising=False)
        monkeypatch.setattr(module, "fuses", lambda x, norm: True, raising=False)
    for name in ("add_norm", "swiglu", "norm_gate", "local_mixing.api", "lightnet.attention", "lightnet.layer"):
        module = import_module(f"ndlightnet.ops.{name}")
        monkeypatch.setattr(module, "resolve", lambda *_, **__: "triton")


def make(local="values", mixer=None, **options):
    torch.manual_seed(0)
    block = Block(DIM, mixer or (lambda dim: LightNetAttention(dim, HEADS, dims=2, local=local)), **options).to(DEVICE)
    with torch.no_grad():
        for norm in (block.norm1, block.norm2):
            norm.weight.add_(torch.randn(DIM, device=DEVICE) / 4)
            norm.bias.normal_(0, 0.25)
    return block


def results(block, x, **options):
    x = x.detach().requires_grad_()
    y = block(x, **options)
    return y, *grad(y.square().sum(), [x, *block.parameters()])


CASES = {
    "grid": {},
    "local input": {"local": "both"},
    "causal": {"causal": True},
    "mask": {"mask": True},
    "pack": {"pack": True},
    "another mixer": {"mixer": lambda dim: GLA(dim, heads=HEADS)},
    "a mixer with biases": {"mixer": lambda dim: LightNetAttention(dim, HEADS, dims=2, bias=True)},
    "a drop path": {"drop_path": 0.5},
}


@pytest.mark.parametrize("name", CASES)
def test_results(request, name):
    options = dict(CASES[name])
    x, call = torch.randn(2, 3, 4, DIM, device=DEVICE), {}
    if options.pop("causal", False):
        call["causal"] = True
    if options.pop("mask", False):
        call["mask"] = torch.rand(2, 3, 4, device=DEVICE) < 0.7
    if options.pop("pack", False):
        x, call["layout"] = torch.randn(10, DIM, device=DEVICE), Ragged([(2, 3), (1, 4)])
    block = make(**options)
    torch.manual_seed(1)
    expected = results(block, x, **call)
    request.getfixturevalue("as_on_a_gpu")
    torch.manual_seed(1)
    for a, b in zip(results(block, x, **call), expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)
    with torch.no_grad():
        torch.manual_seed(1)
        torch.testing.assert_close(block(x, **call), expected[0], atol=1e-5, rtol=1e-5)


def kept(block, x):
    """Bytes a token that a block under autocast keeps, without States, parameters and their 16-bit copies."""
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autocast(DEVICE.type, BRAIN), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        block(x)
    tokens = x.numel() // DIM
    each = [t.untyped_storage().nbytes() for t in storages.values() if tokens in (t.shape[0], t.shape[:2].numel())]
    return sum(each) // tokens


def test_what_a_block_keeps(as_on_a_gpu):
    """Two norms, q, k, v, the read, local mixing: 7 numbers of 2 bytes a channel. The gate's input, and gate and up of
    the MLP. Of each norm two statistics or one, in 4 bytes."""
    x = torch.randn(2, 6, 8, DIM, device=DEVICE, requires_grad=True)
    assert kept(make(), x) == 2 * (7 * DIM + DIM // HEADS + 2 * HIDDEN) + 4 * (1 + 1 + 2)


def network(**options):
    torch.manual_seed(0)
    sizes = {"patch_size": 2, "embed_dim": DIM, "depth": 3, "tpe_states": 4}
    return NDLightNet(2, 1, 3, **sizes, mixer=lambda dim: LightNetAttention(dim, HEADS, dims=2), **options).to(DEVICE)


class Former(Block):
    """A block of a user's own, that knows no branch."""

    def forward(self, x, mask=None, causal=False, layout=None):
        return super().forward(x, mask, causal, layout)


def adds(call):
    """How often a stream is added to in torch."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiled:
        call()
    return sum(e.name == "aten::add" and e.input_shapes[:2] == [[1, 12, DIM]] * 2 for e in profiled.events())


@pytest.mark.parametrize("way", ["plain", "recomputed", "hooked", "compiled", "subclassed"])
def test_the_next_norm_adds_a_branch(as_on_a_gpu, monkeypatch, way):
    """Within a network: only what the last block adds is a pass of its own. Where a block is more than its class says,
    its result is the sum."""
    net, seen = network(), []
    x = torch.randn(1, 1, 6, 8, device=DEVICE)
    net.set_grad_checkpointing(way == "recomputed")
    if way == "hooked":
        net.blocks[1].register_forward_hook(lambda *arguments: seen.append(arguments[2]))
    if way == "subclassed":
        net.blocks[1].__class__ = Former
    if way == "compiled":
        net.blocks[1].compile(fullgraph=True, backend="aot_eager")

    def results():
        y = net(x)
        return y, *grad(y.square().sum(), [*net.parameters()])

    actual = results()
    if way in ("plain", "recomputed"):
        embedded = adds(lambda: net._embedded(x, None))
        with torch.autocast(DEVICE.type, BRAIN):
            assert adds(lambda: net(x)) - embedded == (1 if way == "plain" else 3)
    monkeypatch.setattr(backbone, "fuses", lambda x, norm: False)
    for a, b in zip(actual, results(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)
    if way == "hooked":
        torch.testing.assert_close(*(z for z in seen if z.requires_grad))


def test_the_last_norm_keeps_the_precision_of_the_stream(as_on_a_gpu):
    net, z = network(), torch.randn(5, DIM, device=DEVICE)
    with torch.autocast(DEVICE.type, BRAIN):
        actual = exact_norm(z, net.norm)
    torch.testing.assert_close(actual, net.norm(z))


def test_hooks_see_normed_tokens(as_on_a_gpu):
    """A hook on the mixer or the MLP gets normed tokens, and its parts run one by one."""
    x, block, seen = torch.randn(1, 2, 3, DIM, device=DEVICE), make(), []
    for module in (block.mixer, block.mlp):
        module.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    block(x)
    assert len(seen) == 2
    torch.testing.assert_close(seen[0].view(x.shape), block.norm1(x))


def test_a_mixer_with_a_mix_of_its_own_gets_normed_tokens(as_on_a_gpu):
    class Doubled(LightNetAttention):
        def mix(self, x, layout, mask, causal):
            return 2 * super().mix(x, layout, mask, causal)

    x, block = torch.randn(1, 2, 3, DIM, device=DEVICE), make(mixer=lambda dim: Doubled(dim, HEADS, dims=2))
    mixed = x + block.mixer(block.norm1(x))
    torch.testing.assert_close(block(x), mixed + block.mlp(block.norm2(mixed)))


def test_another_mlp_is_called(as_on_a_gpu):
    """A wrapper, which passes other attributes on, as those of FSDP and of checkpointing do."""

    class Wrapper(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x):
            return 2 * self.inner(x)

    x, block = torch.randn(1, 2, 3, DIM, device=DEVICE), make()
    once = block(x)
    block.mlp.down_proj.weight.data *= 2
    twice = block(x)
    block.mlp.down_proj.weight.data /= 2
    for mlp in (Wrapper(block.mlp), torch.nn.Sequential(block.mlp, torch.nn.Identity())):
        block.mlp = mlp
        torch.testing.assert_close(block(x), twice if isinstance(mlp, Wrapper) else once)


def test_compiled_whole(as_on_a_gpu):
    x, block = torch.randn(1, 2, 3, DIM, device=DEVICE), make()
    expected = results(block, x)
    block.compile(fullgraph=True, backend="aot_eager")
    for a, b in zip(results(block, x), expected, strict=True):
        torch.testing.assert_close(a, b)
