"""LayerScale (Touvron et al., arXiv 2103.17239) for any mixer: an experiment."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ndlightnet.layout import Layout
from ndlightnet.nn.mixers.base import Factory, Mixer, build_mixer


class LayerScale(Mixer):
    """Return s * mixer(x), with a learnt factor s for each channel that starts at `start`."""

    undecayed = ("scale",)

    def __init__(
        self,
        dim: int,
        mixer: Factory,
        *,
        start: float = 0.1,
        dims: int | None = None,
        layer: int | None = None,
        causal: bool | None = None,
    ) -> None:
        super().__init__()
        self.mixer = build_mixer(mixer, dim, dims=dims, layer=layer or 0, causal=causal)
        self.scale = nn.Parameter(torch.full((dim,), start))

    def mix(self, x: Tensor, layout: Layout, mask: Tensor | None, causal: bool) -> Tensor:
        y: Tensor = self.mixer(x, mask=mask, causal=causal, layout=layout)
        return self.scale * y
