"""Doors to timm, segmentation_models_pytorch and MONAI: they take whole networks as they are, and MultiheadAttention's
mathematics, and mixers, in the place of the attention of theirs."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import segmentation_models_pytorch
import timm as timm_
import torch
from monai.inferers import SimpleInferer, sliding_window_inference
from monai.networks.nets import UNETR, SwinUNETR
from timm.models import group_parameters
from timm.models._features import FeatureGetterNet
from timm.models._hub import save_for_hf
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

import ndlightnet.integrations.timm  # noqa: F401
from ndlightnet.integrations import replace_attention
from ndlightnet.integrations.monai_encoders import UNETREncoder

from .door_models import Case

NAME = "ndlightnet_tiny_local"
DEPTH = 2  # blocks, so that features of inner ones differ from the last ones
MONAI = {"dims": "spatial_dims", "in_chans": "in_channels", "num_classes": "out_channels"}


def timm(case: Case, tmp_path: Path) -> None:
    """Features, layer groups, the optimiser and the average of weights; with two axes also by
    timm's name, and saved in its form."""
    if case.is_layer or case.mixer:
        _timm_layers(case, tmp_path)
    if case.is_layer:
        return
    net = _network(case)
    if not case.is_unet:
        _features(case, net)
        _layer_groups(net)
        if net.dims == 2:
            _by_name(case, net, tmp_path)
    _training(case, net)


def smp(case: Case, tmp_path: Path) -> None:
    """DPT on the features of a network of two axes; it has twelve blocks, as DPT has an argument `depth` of its own."""
    options = {k: v for k, v in _options(case).items() if k not in ("dims", "depth", "num_classes")}
    encoder = {"encoder_depth": 2, "encoder_weights": None, "encoder_output_indices": [0, -1]}
    decoder = {"readout": "ignore", "intermediate_channels": (8, 8), "fusion_channels": 8}
    options |= encoder | {f"decoder_{name}": value for name, value in decoder.items()}
    net = segmentation_models_pytorch.DPT(f"tu-{NAME}", classes=3, **options).eval()
    assert not net.encoder.is_fixed_input_size
    for at in (0, 2):
        (x,) = case.inputs(at, batch=1)
        x = x[..., : x.shape[2] // 8 * 8, : x.shape[3] // 8 * 8]  # sizes that its decoder can join
        with torch.no_grad():
            _, maps = _by_hand(net.encoder.model, x)
            maps = [maps[at].movedim(-1, 1).contiguous() for at in (0, -1)]
            expected = net.segmentation_head(net.decoder(maps, [None, None]))
            assert expected.shape[:2] == (1, 3) and torch.equal(net(x), expected)


def monai(case: Case, tmp_path: Path) -> None:
    """MONAI's names and inferers; its UNETR around an NDLightNet."""
    if case.is_layer or case.mixer:
        _monai_layers(case)
    if case.is_layer:
        return
    net = _network(case)
    options = {MONAI.get(name, name): value for name, value in _options(case).items()}
    twin = type(net)(**options).eval()
    twin.load_state_dict(net.state_dict())
    with torch.no_grad():
        for at in range(len(case.sizes)):
            (x,) = case.inputs(at, batch=1)
            assert torch.equal(SimpleInferer()(x, twin), net(x))
        if case.is_unet:
            _windows(case, net)
        elif case.takes == "words":
            with pytest.raises(ValueError, match="vocab_size=50 and 12 blocks: expected a network of"):
                UNETREncoder(case.make(depth=12))
        else:
            _unetr(case, net.dims)


def _network(case: Case) -> Any:
    return case.make(**_depth(case)).eval()


def _depth(case: Case) -> dict[str, int]:
    return {} if case.is_unet else {"depth": DEPTH}


def _options(case: Case) -> dict[str, Any]:
    """The arguments of a network of the table by their names."""
    names = ("dims", "in_chans", "num_classes")
    return dict(zip(names, case.make.args, strict=False)) | case.make.keywords | _depth(case)


def _by_hand(net: Any, x: Any) -> tuple[Any, list[Any]]:
    """The features of a network, and those after each of its blocks, recorded by hooks."""
    outputs: list[Any] = []
    hooks = [b.register_forward_hook(lambda _, __, y: outputs.append(y)) for b in net.blocks]
    features = net.forward_features(x)
    for hook in hooks:
        hook.remove()
    return features, [y.view(features.shape) for y in outputs]


@torch.no_grad()
def _features(case: Case, net: Any) -> None:
    getter = FeatureGetterNet(deepcopy(net), out_indices=[0], output_fmt="NHWC")
    assert len(getter.model.blocks) == 1 and getter.feature_info.channels() == [net.embed_dim]
    for at in (0, 3):
        (x,) = case.inputs(at)
        expected, blocks = _by_hand(net, x)
        features, maps = net.forward_intermediates(x)
        assert torch.equal(features, expected)
        assert all(torch.equal(m, b.movedim(-1, 1)) for m, b in zip(maps, blocks, strict=True))
        (last,) = net.get_intermediate_layers(x, norm=True)
        assert torch.equal(last, expected.flatten(1, -2))
        assert torch.equal(getter(x)[0], blocks[0])


def _layer_groups(net: Any) -> None:
    layers = group_parameters(net, net.group_matcher(), reverse=True)
    depth = len(net.blocks)
    for name, _ in net.named_parameters():
        top, *rest = name.split(".")
        expected = {"embed": 0, "tpe": 0, "norm": depth, "head": depth + 1}.get(top)
        assert layers[name] == (int(rest[0]) + 1 if top == "blocks" else expected), name


@torch.no_grad()
def _by_name(case: Case, net: Any, tmp_path: Path) -> None:
    options = {name: value for name, value in _options(case).items() if name != "dims"}
    named = timm_.create_model(NAME, **options).eval()
    named.load_state_dict(net.state_dict())
    maps = timm_.create_model(NAME, features_only=True, out_indices=(0, -1), **options).eval()
    maps.model.load_state_dict(net.state_dict(), strict=False)
    for at in range(len(case.sizes)):
        (x,) = case.inputs(at, batch=1)
        assert torch.equal(named(x), net(x))
        _, blocks = _by_hand(net, x)
        expected = [blocks[i].movedim(-1, 1) for i in (0, -1)]
        assert all(map(torch.equal, maps(x), expected))
    assert timm_.data.resolve_model_data_config(named)["input_size"] == (3, 224, 224)
    if "mixer" not in options:  # timm's file of arguments is JSON
        save_for_hf(named, tmp_path / "timm", safe_serialization=True)
        again = timm_.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
        assert torch.equal(again(x), net(x))


def _training(case: Case, net: Any) -> None:
    """A step of timm's optimiser, with layer decay where there are blocks, and its average."""
    net, decay = deepcopy(net).train(), {"layer_decay": 0.5} if hasattr(net, "blocks") else {}
    average = timm_.utils.ModelEmaV3(net, decay=0.5)
    before = deepcopy(net.state_dict())
    optimizer = create_optimizer_v2(net, opt="adamw", lr=1e-3, weight_decay=0.1, **decay)
    undecayed, names = net.no_weight_decay(), {p: n for n, p in net.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            decayed = parameter.ndim > 1 and names.pop(parameter) not in undecayed
            names.pop(parameter, None)
            assert group["weight_decay"] == (0.1 if decayed else 0)
    assert not names  # each has a group
    net(*case.inputs()).square().mean().backward()
    optimizer.step()
    average.update(net)
    after, mean = net.state_dict(), average.module.state_dict()
    assert not all(torch.equal(after[name], before[name]) for name in after)
    tied = bool(getattr(net, "vocab_size", None))
    for name, value in mean.items():
        # timm averages by the names of the state dict: a tied weight has two, and moves twice
        old = 0.25 if tied and name in ("embed.weight", "head.weight") else 0.5
        expected = torch.lerp(after[name], before[name], old)
        assert torch.allclose(value, expected, rtol=1e-6, atol=1e-7), name


def _windows(case: Case, net: Any) -> None:
    """Where one window alone lies, its logits are the network's on that window."""
    for at in (0, 2):
        (x,) = case.inputs(at, batch=1)
        space = x.shape[2:]
        window = tuple(max(4, size // 2 + 1) for size in space)
        y = sliding_window_inference(x, window, 2, net, overlap=0)
        alone = (..., *(slice(n - w) for n, w in zip(space, window, strict=True)))
        logits = net(x[(..., *map(slice, window))])
        assert y.shape[2:] == space and torch.allclose(y[alone], logits[alone], atol=1e-4)


def _unetr(case: Case, dims: int) -> None:
    """UNETR's decoder gets the features of the network's blocks."""
    backbone = case.make(depth=12, patch_size=16).eval()
    sizes = {"img_size": 32, "feature_size": 4, "hidden_size": 32, "mlp_dim": 8, "num_heads": 2}
    net = UNETR(3, 2, spatial_dims=dims, **sizes).eval()
    net.vit = UNETREncoder(backbone)
    x = torch.randn(1, 3, *[32] * dims)
    features, blocks = _by_hand(backbone, x)
    last, hidden = net.vit(x)
    assert torch.equal(last, features.flatten(1, -2)) and len(hidden) == 12
    assert all(torch.equal(h, b.flatten(1, -2)) for h, b in zip(hidden, blocks, strict=True))
    assert net(x).shape == (1, 2, *x.shape[2:])


def _timm_layers(case: Case, tmp_path: Path) -> None:
    """A vision transformer of timm is its own blocks around our layer; it trains, and its weights come back."""

    def make() -> Any:
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3, "depth": 2}
        net = timm_.create_model("vit_tiny_patch16_224", **sizes, num_classes=5, class_token=False, global_pool="avg")
        replace_attention(net, case.mixer)
        return net.eval()

    net, x = make(), torch.randn(2, 3, 32, 32)
    tokens = net._pos_embed(net.patch_embed(x))
    for block in net.blocks:
        mixed = _on_grid(block.attn.tokens.mixer, block.norm1(tokens), (4, 4))
        tokens = tokens + mixed
        tokens = tokens + block.mlp(block.norm2(tokens))
    expected = net.forward_head(net.norm(tokens))
    y = net(x)
    assert torch.allclose(y, expected, atol=1e-5)
    _trains(net, y)
    torch.save(net.state_dict(), tmp_path / "vit.pt")
    again = make()
    again.load_state_dict(torch.load(tmp_path / "vit.pt"))
    assert torch.allclose(again(x), y, atol=1e-6)


def _monai_layers(case: Case) -> None:
    """A SwinUNETR of MONAI is its own blocks around our layer on the whole grid; it trains, and
    predicts in sliding windows."""
    net = SwinUNETR(1, 2, feature_size=12, depths=(1, 1, 1, 1), spatial_dims=2)
    replace_attention(net, case.mixer)
    block, x = net.eval().swinViT.layers1[0].blocks[0], torch.randn(2, 5, 6, 12)
    tokens = block.norm1(x).flatten(1, 2)
    mixed = x + _on_grid(block.attn, tokens, (5, 6)).view_as(x)
    assert torch.allclose(block(x, None), mixed + block.mlp(block.norm2(mixed)), atol=1e-5)
    y = net(torch.randn(1, 1, 64, 64))
    _trains(net, y)
    with torch.no_grad():
        scan = torch.randn(1, 1, 80, 64)
        y = sliding_window_inference(scan, (64, 64), 1, net, overlap=0.5)
        assert torch.allclose(y[:, :, :16], net(scan[:, :, :64])[:, :, :16], atol=1e-4)


def _on_grid(mixer: nn.Module, tokens: Tensor, grid: tuple[int, ...]) -> Tensor:
    """The mixer's own call, on tokens that have the shape of their grid."""
    out: Tensor = mixer(tokens.unflatten(1, grid))
    return out.flatten(1, 2)


def _trains(net: nn.Module, y: Tensor) -> None:
    y.square().mean().backward()
    used = [p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters()]
    assert sum(used) > 0.8 * len(used)
    mixers = [m for m in net.modules() if type(m).__module__.startswith("ndlightnet.nn.mixers")]
    assert mixers and all(p.grad is not None for m in mixers for p in m.parameters())
