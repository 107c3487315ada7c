"""What constructors draw, `reset_parameters` draws again: in memory full of NaN, from device meta,
sharded; number by number with the same seed."""

from functools import partial

import pytest
import torch
from torch import nn

from ndlightnet import MultiheadAttention, NDLightDiT, NDLightNet, NDLightUNet
from ndlightnet.models import AutoregressiveTTS, Forecaster, ParallelTTS, PointCompletion, Seq2Seq
from ndlightnet.nn import GLU, MDLRPE, MDTPE, Block, Patchify, mixers
from ndlightnet.nn.depthwise import LocalMixing
from ndlightnet.nn.initial import assign, owners

DIM = 32
NET = partial(NDLightNet, embed_dim=DIM, depth=2, tpe_states=4, num_classes=3)
MODULES = {
    **{name: partial(getattr(mixers, name), DIM) for name in mixers.__all__},
    "forget": partial(mixers.LightNetAttention, 64, 2, forget=[0.1, 0.7], dims=2, local="both"),
    "WithLocal": partial(mixers.WithLocal, DIM, mixers.LAVO, dims=2, local="both"),
    "biases": partial(mixers.LAVO, DIM, window=(2, 3)),
    "GLU": partial(GLU, DIM),
    "Block": partial(Block, DIM, mixers.Mamba),
    "Patchify": partial(Patchify, 2, 3, 4, DIM),
    "MDTPE": partial(MDTPE, 2, DIM, 4),
    "MDLRPE": partial(MDLRPE, 2, 8, "cosine"),
    "LocalMixing": partial(LocalMixing, 2, DIM),
    "MultiheadAttention": partial(MultiheadAttention, DIM, 4),
    "image": partial(NET, 2),
    "image without a head": partial(NET, 2, num_classes=0),
    "residual convolutions": partial(NET, 2, stem_blocks=1, patch_size=2),
    "words": partial(NET, 1, vocab_size=9, causal=True, num_classes=None, mixer="text_mixer"),
    "unet": partial(NDLightUNet, 2, widths=(4, 8), depths=(1, 1)),
    "separable unet": partial(NDLightUNet, 4, widths=(4, 8), depths=(0, 1), deep_supervision=True),
    "diffusion transformer": partial(NDLightDiT, 2, 1, 3, embed_dim=DIM, depth=2, tpe_states=4),
    "sequence to sequence": partial(Seq2Seq, 11, embed_dim=16, depth=1, decoder_depth=1),
    "speech by steps": partial(AutoregressiveTTS, 11, 5, embed_dim=16, depth=1, decoder_depth=1),
    "speech at once": partial(ParallelTTS, 11, 5, embed_dim=16, depth=1, decoder_depth=1),
    "clouds": partial(PointCompletion, 8, 4, embed_dim=16, depth=1, decoder_depth=1),
    "forecaster": partial(Forecaster, embed_dim=16, cross=mixers.GLA),
}
modules = pytest.mark.parametrize("name", MODULES)


def numbers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def poison(module: nn.Module) -> None:
    with torch.no_grad():
        for x in numbers(module).values():
            x.fill_(torch.nan if x.is_floating_point() else 7)


gpu = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])


@modules
@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("built_on_meta", [False, True])
def test_a_reset_module_is_a_new_one(name, built_on_meta, device):
    with torch.device(device):
        torch.manual_seed(0)
        new = MODULES[name]()
    with torch.device("meta" if built_on_meta else device):
        module = MODULES[name]()
    if built_on_meta:
        assert all(x.is_meta for x in numbers(module).values())
        module.to_empty(device=device)
    poison(module)
    torch.manual_seed(0)
    module.reset_parameters()
    expected, reset = numbers(new), numbers(module)
    assert expected.keys() == reset.keys()
    for key, x in expected.items():
        assert torch.equal(x, reset[key]), key
        assert x.requires_grad == reset[key].requires_grad and x.dtype == reset[key].dtype


# What nnU-Net, segmentation_models_pytorch, timm, transformers, diffusers, MONAI and Lightning call
# for initial values, often with a module as argument: `net.apply(net.initialize)`.
TAKEN = ("initialize", "initialize_weights", "_initialize_weights", "init_weights", "_init_weights")


@modules
def test_all_that_holds_parameters_can_be_reset_by_this_name_only(name):
    for module in MODULES[name]().modules():
        assert not [taken for taken in TAKEN if hasattr(module, taken)], type(module)
        if type(module).__module__.startswith("ndlightnet") and next(module.parameters(), None) is not None:
            assert callable(getattr(module, "reset_parameters", None)), type(module)


class Holder(nn.Module):
    """It holds a parameter, and cannot be initialised again."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))


def test_a_module_that_cannot_is_named():
    with pytest.raises(ValueError, match=r"blocks.1.mixer: Holder holds parameters and has no reset"):
        NET(2, mixer=[mixers.Identity, Holder]).reset_parameters()
    net = NET(2, mixer=lambda dim: nn.MultiheadAttention(dim, 1))
    poison(net)
    net.reset_parameters()
    assert all(p.isfinite().all() for p in net.parameters())


def test_tied_parameters_are_drawn_once():
    net = MODULES["words"]()
    names = [name for name, _ in owners(net)]
    assert "embed" in names and "head" not in names and names[-1] == ""
    assert abs(net.head.weight.std() - 0.02) < 0.005  # as the embedding's, of 9 * 32 numbers


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["LightNetAttention", "S5", "LAVO", "RWKV4", "GatedDeltaNet"])
def test_sharded_parameters_are_reset(mixer, tmp_path):
    """As users of fully_shard do: built on meta, sharded, given memory, then initialised."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        net = NET(2, mixer=mixer, device="meta")
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        net.to_empty(device="cpu")
        poison(net)
        net.reset_parameters()
        weights = {key: x.full_tensor() for key, x in net.state_dict().items()}
        assert all(x.isfinite().all() for x in weights.values())
        plain = NET(2, mixer=mixer)
        plain.load_state_dict(weights)
        x = torch.randn(1, 3, 32, 32)
        torch.testing.assert_close(net.eval()(x), plain.eval()(x))
        net.blocks[0].reshard()
        param = net.blocks[0].norm1.bias
        assign(param, torch.ones(param.shape))
        assert (param.full_tensor() == 1).all()
    finally:
        dist.destroy_process_group()


def test_slopes_of_tnl():
    """2^(-8 h / heads), h = 1, ..., heads, which published weights expect."""
    slopes = nn.functional.softplus(mixers.TNL(DIM, heads=4).slope)
    torch.testing.assert_close(slopes, torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]))
