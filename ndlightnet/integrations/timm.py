"""NDLightNet on images as models of timm. After `import ndlightnet.integrations.timm`,

    timm.create_model("ndlightnet_small", num_classes=10)

makes the network of that name in `ndlightnet`, here with patches of 16 x 16, and
`ndlightnet_small_local` the library's default network of that width, with local mixing. timm has no
entry points: it knows the names once this module is imported. No weights are published; those of
your own load with `pretrained=True, pretrained_cfg_overlay={"file": "weights.safetensors"}`, also
into another number of channels or classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

import ndlightnet
from ndlightnet.layout import per_axis
from ndlightnet.models.backbone import NDLightNet
from ndlightnet.models.features import adapt_in_chans

__all__ = ["ImageNDLightNet"]  # register_model adds the names of the models

Size = int | Sequence[int]


class ImageNDLightNet(NDLightNet):
    """NDLightNet of two axes, which takes timm's arguments for images too.

    Args:
        global_pool: "avg", the mean over tokens, or "", the head on every token.
        img_size: the size that `timm.models.get_model_input_config` reports; any size works.
        dynamic_img_size: True, the only form.
        dims: 2. in_chans, num_classes, options: of NDLightNet.
    """

    def __init__(
        self,
        dims: int = 2,
        in_chans: int = 3,
        num_classes: int = 1000,
        *,
        global_pool: str = "avg",
        img_size: Size | None = None,
        dynamic_img_size: bool = True,
        **options: Any,
    ) -> None:
        if dims != 2 or not dynamic_img_size:
            raise ValueError(
                f"dims={dims}, dynamic_img_size={dynamic_img_size}: expected 2 and True, images of "
                "any size"
            )
        super().__init__(dims, in_chans, num_classes, **{"patch_size": 16} | options)
        if global_pool != "avg":
            self.reset_classifier(num_classes, global_pool)
        if img_size is not None:
            self.set_input_size(img_size)

    def set_input_size(self, img_size: Size | None = None, patch_size: Size | None = None) -> None:
        """As in NDLightNet. Both are noted where timm looks for them: `save_for_hf` saves them."""
        super().set_input_size(img_size, patch_size)
        noted = {"img_size": per_axis("img_size", img_size, 2)} if img_size is not None else {}
        self._traits = {**getattr(self, "_traits", {}), **noted}
        if patch_size is not None:
            noted["patch_size"] = per_axis("patch_size", patch_size, 2)
        self._model_args = {**getattr(self, "_model_args", {}), **noted}


def _register(name: str, network: partial[NDLightNet], what: str) -> None:
    """Register a network of the library with timm, under the same name."""
    defaults = network.keywords

    def make(pretrained: bool = False, **options: Any) -> Any:
        return build_model_with_cfg(
            ImageNDLightNet, name, pretrained, pretrained_filter_fn=adapt_in_chans,
            feature_cfg={"out_indices": 3, "feature_cls": "getter"}, **defaults | options,
        )  # fmt: skip

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"{what}, with patches of 16 x 16."
    globals()[name] = register_model(make)


_config: Callable[..., dict[str, Any]] = partial(
    dict, input_size=(3, 224, 224), num_classes=1000, mean=IMAGENET_DEFAULT_MEAN,
    std=IMAGENET_DEFAULT_STD, interpolation="bicubic", crop_pct=0.9, fixed_input_size=False,
    first_conv="embed.proj", classifier="head",
)  # fmt: skip
_widths = {"tiny": 192, "small": 384, "base": 768}
default_cfgs = generate_default_cfgs(
    {f"ndlightnet_{size}{kind}": _config() for size in _widths for kind in ("", "_local")}
)
for _size, _width in _widths.items():
    _register(
        f"ndlightnet_{_size}", getattr(ndlightnet, f"ndlightnet_{_size}"),
        f"The paper's network of width {_width}",
    )  # fmt: skip
    _register(
        f"ndlightnet_{_size}_local", partial(NDLightNet, embed_dim=_width),
        f"NDLightNet of width {_width} with its default mixer, which has local mixing",
    )  # fmt: skip
