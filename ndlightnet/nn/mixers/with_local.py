"""A local branch for any mixer: a depthwise convolution beside it, in front of it, or both."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor
from torch.nn.functional import silu

from ndlightnet.layout import Grid, Layout
from ndlightnet.nn.local import LocalMixing, LocalState, Where
from ndlightnet.nn.mixers.base import Mixer, Named, StreamingMixer, build_mixer, zero_padding
from ndlightnet.ops.dispatch import Impl


class WithLocal(StreamingMixer):
    """Another mixer with a local branch: y = mixer(x) + output_map(SiLU(local(values(x)))), where
    values and output_map are the mixer's own, see Mixer.

    As output maps are linear, this is the mixer with SiLU(local(values)) added to what its output
    map reads. Weights are shared, so the branch adds taps * dim parameters; values and output map
    are computed twice. A mixer that streams also does so with the branch; there is no cross form.

    Args:
        dim: channels of a token.
        mixer: a function of the width that returns a Mixer, or a name as in networks.
        local: "values", as above; "input": mixer(x + local(x)); "both": the first of x + local(x).
        radius, dense: as in LocalMixing.
        dims, layer, causal: number of axes, index of the layer, whether the causal form is called;
            networks give them.
        impl: of the convolution; see ndlightnet.ops.local_mixing.

    Parameters: those of the mixer and taps * dim (the channels of its values), twice for "both".
    """

    ragged, mergeable = True, True

    def __init__(
        self,
        dim: int,
        mixer: Named,
        *,
        local: Where = "values",
        radius: int = 1,
        dense: bool = False,
        dims: int | None = None,
        layer: int | None = None,
        causal: bool | None = None,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        if local not in get_args(Where):
            raise ValueError(f"local={local!r}: expected 'values', 'input' or 'both'")
        if dims is None:
            raise ValueError("dims=None: expected the number of axes, which networks give")
        made = build_mixer(mixer, dim, dims=dims, layer=layer or 0, causal=causal)
        if not isinstance(made, Mixer):
            raise ValueError(f"mixer: makes a {type(made).__name__}, expected a Mixer")
        self.mixer = made
        width = made.values(torch.zeros(1, 0, dim)).shape[-1]

        def convolution(channels: int, wanted: bool) -> LocalMixing | None:
            return LocalMixing(dims, channels, radius, dense, impl) if wanted else None

        self.local_values = convolution(width, local != "input")
        self.local_input = convolution(dim, local != "values")

    def mix(self, x: Tensor, layout: Layout, mask: Tensor | None, causal: bool) -> Tensor:
        if self.local_input is not None:
            x = x + self.local_input(x, layout, mask, causal)
        y: Tensor = self.mixer(x, mask=mask, causal=causal, layout=layout)
        if self.local_values is None:
            return y
        (x,) = zero_padding(mask, x)
        return y + self._branch(self.local_values(self.mixer.values(x), layout, mask, causal))

    def _branch(self, u: Tensor) -> Tensor:
        return self.mixer.output_map(silu(u))

    def implementation(self, x: Tensor, causal: bool = False) -> str:
        return self.mixer.implementation(x, causal)

    @property
    def state_size(self) -> int | None:  # type: ignore[override]
        return None if self.mixer.state_size is None else super().state_size

    def init_state(
        self, batch: int, device: torch.device | str | None = None, space: tuple[int, ...] = ()
    ) -> LocalState:
        frames = (
            () if one is None else one.init_state(batch, device, space) for one in (self.local_values, self.local_input)
        )
        return LocalState(self._streaming().init_state(batch, device, space), *frames)

    def step(self, x: Tensor, grid: Grid, state: LocalState) -> tuple[Tensor, LocalState]:
        inner, values, inputs = state
        if self.local_input is not None:
            u, inputs = self.local_input.step(x, grid, inputs)
            x = x + u
        y, inner = self._streaming().step(x, grid, inner)
        if self.local_values is not None:
            u, values = self.local_values.step(self.mixer.values(x), grid, values)
            y = y + self._branch(u)
        return y, LocalState(inner, values, inputs)

    def _streaming(self) -> StreamingMixer:
        if not isinstance(self.mixer, StreamingMixer):
            raise ValueError(f"{type(self.mixer).__name__} has no method advance: it cannot go frame by frame")
        return self.mixer
