"""NDLightNet on images as models of timm. After `import ndlightnet.integrations.timm`,

    timm.create_model("ndlightnet_small", num_classes=10)

makes the network of that name in `ndlightnet`, here with patches of 16 x 16, and `ndlightnet_small_local` the library's
default network of that width, with local mixing. timm has no entry points: it knows the names once this module is
imported. No weights are published; those of your own load with `pretrained=True, pretrained_cfg_overlay={"file":
"weights.safetensors"}`, also into another number of channels or classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

import ndlightnet
from ndlightnet.models.backbone import NDLightNet
from ndlightnet.models.weights import adapt_in_chans

__all__ = ["images"]  # register_model adds the names of the models

Size = int | Sequence[int]


def images(
    *,
    num_classes: int = 1000,
    global_pool: str = "avg",
    img_size: Size | None = None,
    dynamic_img_size: bool = True,
    patch_size: Size = 16,
    **options: Any,
) -> NDLightNet:
    """Return an NDLightNet of two axes, from timm's arguments for images too.

    Args:
        global_pool: "avg", the mean over tokens, or "", the head on every token.
        img_size: the size that `timm.models.get_model_input_config` reports; any size works.
        dynamic_img_size: True, the only form.
        num_classes, patch_size, options: of NDLightNet.
    """
    if not dynamic_img_size:
        raise ValueError("dynamic_img_size=False: expected True, images of any size")
    size = tuple(patch_size) if isinstance(patch_size, Sequence) else patch_size
    net = NDLightNet(2, num_classes=num_classes, patch_size=size, **options)
    net.set_input_size(img_size)
    if global_pool != "avg":
        net.reset_classifier(num_classes, global_pool)
    return net


def _register(name: str, network: partial[NDLightNet], mixer: str) -> None:
    """Register a network of the library with timm. mixer: its mixer, in words."""
    width = network.keywords["embed_dim"]

    def make(pretrained: bool = False, **options: Any) -> Any:
        features = {"out_indices": 3, "feature_cls": "getter"}
        filters: Any = {"pretrained_filter_fn": adapt_in_chans, "feature_cfg": features}
        return build_model_with_cfg(images, name, pretrained, **filters, **network.keywords | options)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"The network `{name}` of width {width} with {mixer}, on patches of 16 x 16."
    globals()[name] = register_model(make)


_widths = {"tiny": 192, "small": 384, "base": 768}
_paper = {f"ndlightnet_{size}": getattr(ndlightnet, f"ndlightnet_{size}") for size in _widths}
_local = {f"ndlightnet_{size}_local": partial(NDLightNet, embed_dim=width) for size, width in _widths.items()}
_config = {
    "input_size": (3, 224, 224),
    "num_classes": 1000,
    "mean": IMAGENET_DEFAULT_MEAN,
    "std": IMAGENET_DEFAULT_STD,
    "interpolation": "bicubic",
    "crop_pct": 0.9,
    "fixed_input_size": False,
    "first_conv": "embed.proj",
    "classifier": "head",
}
default_cfgs = generate_default_cfgs({name: {**_config} for name in (*_paper, *_local)})
for _name, _network in _paper.items():
    _register(_name, _network, "the paper's mixer")
for _name, _network in _local.items():
    _register(_name, _network, "the default mixer, which has local mixing")
