"""A local branch of a mixer: a depthwise convolution beside it, in front of it, or both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from ndlightnet.layout import Grid, Layout
from ndlightnet.nn.depthwise import LocalMixing
from ndlightnet.nn.initial import Device, Space
from ndlightnet.nn.mixers.base import Mixer, Named, StreamingMixer, build_mixer, streaming, zero_padding
from ndlightnet.ops.dispatch import Impl

Where = Literal["values", "input", "both"]  # what a mixer mixes locally


class LocalState(NamedTuple):
    """State of the causal form of a mixer with local mixing."""

    memory: Any  # of the mixer without its local branch
    values: Any  # the last frames of the values and of the input; () without that convolution
    input: Any


class LocalMixer(StreamingMixer):
    """Base class of mixers with a local branch: x + local x enters the mixer, local values are added
    to what its output map reads, or both. Constructors call `make_branch`."""

    places: ClassVar[tuple[Where | None, ...]] = (*get_args(Where), None)  # values of `local`
    local_values: LocalMixing | None
    local_input: LocalMixing | None

    def make_branch(self, local: Where | None, dims: int | None, widths: tuple[int, int], *options: Any) -> None:
        """Make the convolutions on `dims` axes (None: none), of the widths of the input and of the values. options:
        radius, dense and impl of LocalMixing."""
        if local not in self.places:
            *others, last = map(repr, self.places)
            raise ValueError(f"local={local!r}: expected {', '.join(others)} or {last}")

        def convolution(width: int, *kinds: Where) -> LocalMixing | None:
            return None if dims is None or local not in kinds else LocalMixing(dims, width, *options)

        self.local_values = convolution(widths[1], "values", "both")
        self.local_input = convolution(widths[0], "input", "both")

    def add_local(self, x: Tensor, layout: Layout, mask: Tensor | None, causal: bool, prefix: int = 0) -> Tensor:
        """Return x + local x, or x without that convolution. prefix: tokens before the grid's."""
        if self.local_input is None:
            return x
        (x,) = zero_padding(mask, x)
        return x + _begin(self.local_input, x, layout, mask, causal, prefix)()

    def begin_local_values(
        self, v: Tensor, layout: Layout, mask: Tensor | None, causal: bool, prefix: int = 0
    ) -> Callable[[], Tensor | None]:
        """Return, when called, the local values, None without that convolution: a slab of a grid
        sends its edges before that."""
        if self.local_values is None:
            return lambda: None
        return _begin(self.local_values, v, layout, mask, causal, prefix)

    def branch_state(self, batch: int, memory: Any, device: Device, space: Space) -> LocalState:
        """Return the state before the first frame, with the memory of the mixer without branch."""
        branch = (self.local_values, self.local_input)
        return LocalState(memory, *(() if one is None else one.init_state(batch, device, space) for one in branch))

    def step_input(self, x: Tensor, grid: Grid, state: Any) -> tuple[Tensor, Any]:
        """Return x + local x of the next frames, or x, and the next state of that convolution."""
        if self.local_input is None:
            return x, state
        near, state = self.local_input.step(x, grid, state)
        return x + near, state

    def step_values(self, v: Tensor, grid: Grid, state: Any) -> tuple[Tensor | None, Any]:
        """Return the local values of the next frames, or None, and that convolution's next state."""
        return (None, state) if self.local_values is None else self.local_values.step(v, grid, state)


def _begin(
    convolution: LocalMixing, x: Tensor, layout: Layout, mask: Tensor | None, causal: bool, prefix: int
) -> Callable[[], Tensor]:
    if not prefix:
        return convolution.begin(x, layout, mask, causal)
    grid_mask = None if mask is None else mask[:, prefix:]
    return lambda: pad(convolution(x[:, prefix:], layout, grid_mask), (0, 0, prefix, 0))


class WithLocal(LocalMixer):
    """Another mixer with a local branch: y = mixer(x) + output_map(SiLU(local(values(x)))), where values and output_map
    are the mixer's own, see Mixer.

    As output maps are linear, this is the mixer with SiLU(local(values)) added to what its output map reads. Weights
    are shared, so the branch adds taps * dim parameters; values and output map are computed twice. A mixer that streams
    also does so with the branch; there is no cross form.

    Args:
        dim: channels of a token.
        mixer: a function of the width that returns a Mixer, or a name as in networks.
        local: "values", as above; "input": mixer(x + local(x)); "both": the first of x + local(x).
        radius, dense: as in LocalMixing.
        dims, layer, causal: number of axes, index of the layer, whether the causal form is called; networks give them.
        impl: of the convolution; see ndlightnet.ops.local_mixing.

    Parameters: those of the mixer and taps * dim (the channels of its values), twice for "both".
    """

    ragged, mergeable = True, True
    places = get_args(Where)

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
        if dims is None:
            raise ValueError("dims=None: expected the number of axes, which networks give")
        inner = build_mixer(mixer, dim, dims=dims, layer=layer or 0, causal=causal)
        if not isinstance(inner, Mixer):
            raise ValueError(f"mixer: makes a {type(inner).__name__}, expected a Mixer")
        self.mixer = inner
        width = inner.values(torch.zeros(1, 0, dim)).shape[-1]
        self.make_branch(local, dims, (dim, width), radius, dense, impl)

    def mix(self, x: Tensor, layout: Layout, mask: Tensor | None, causal: bool) -> Tensor:
        x = self.add_local(x, layout, mask, causal)
        y: Tensor = self.mixer(x, mask=mask, causal=causal, layout=layout)
        if self.local_values is None:
            return y
        (x,) = zero_padding(mask, x)
        return self._add(y, self.begin_local_values(self.mixer.values(x), layout, mask, causal)())

    def _add(self, y: Tensor, near: Tensor | None) -> Tensor:
        return y if near is None else y + self.mixer.output_map(silu(near))

    def implementation(self, x: Tensor, causal: bool = False) -> str:
        return self.mixer.implementation(x, causal)

    @property
    def state_size(self) -> int | None:  # type: ignore[override]
        return None if self.mixer.state_size is None else super().state_size

    def init_state(self, batch: int, device: Device = None, space: Space = ()) -> LocalState:
        return self.branch_state(batch, streaming(self.mixer).init_state(batch, device, space), device, space)

    def step(self, x: Tensor, grid: Grid, state: LocalState) -> tuple[Tensor, LocalState]:
        x, inputs = self.step_input(x, grid, state.input)
        y, memory = streaming(self.mixer).step(x, grid, state.memory)
        if self.local_values is None:
            return y, LocalState(memory, (), inputs)
        near, values = self.step_values(self.mixer.values(x), grid, state.values)
        return self._add(y, near), LocalState(memory, values, inputs)
