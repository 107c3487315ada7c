"""Doors timm and MONAI for layers: MultiheadAttention's mathematics, and mixers, in the place of
the attention of their networks."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.integrations import replace_attention

from .door_models import Case


def timm(case: Case, tmp_path: Path) -> None:
    """A vision transformer of timm is its own blocks around our layer; it trains, and its weights come back."""
    import timm

    def make() -> Any:
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3, "depth": 2}
        net = timm.create_model("vit_tiny_patch16_224", **sizes, num_classes=5, class_token=False, global_pool="avg")
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


def monai(case: Case, tmp_path: Path) -> None:
    """A SwinUNETR of MONAI is its own blocks around our layer on the whole grid; it trains, and
    predicts in sliding windows."""
    from monai.inferers import sliding_window_inference
    from monai.networks.nets import SwinUNETR

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
