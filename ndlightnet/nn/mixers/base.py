"""Base classes of all mixers."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ndlightnet.layout import Grid, Layout
from ndlightnet.layout.abstract import check_integers
from ndlightnet.nn.initial import Device, Initialized, Space
from ndlightnet.nn.mixers.names import catalogue_name, named_mixer, unwrapped
from ndlightnet.ops.dtypes import check_floats, check_not_wider, product_dtype
from ndlightnet.parallel import layout_of_tokens


class Mixer(Initialized, ABC):
    """Base class of mixers, which map tokens to the same shape, on grids of any number of axes.

    A subclass defines `mix`, and `mix_context` if it has a cross form. For all mixers `forward`
    reshapes tokens to (batch, length, dim), with their layout, and checks mask and context.
    """

    ragged = False  # whether `mix` takes a pack at once; else once for the samples of each shape
    norms = False  # whether `mix` takes the `norm` that its input goes through first
    order_free = False  # whether `mix` gives each token the same in any order of the tokens, but for `causal`
    causal_form = True  # whether `mix` takes causal=True
    mergeable = False  # whether `mix` takes rows that have some of a sample's tokens: boxes, slabs

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "norms" not in vars(cls) and not vars(cls).keys().isdisjoint(("mix", "forward")):
            cls.norms = False  # a base's; a form of its own may not take the argument

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        layout: Layout | None = None,
        context: Tensor | None = None,
        source: Grid | None = None,
        norm: nn.Module | None = None,
        branch: Tensor | None = None,
    ) -> Any:
        """Map tokens (batch, *grid, dim) to the same shape.

        mask: bool over the source's tokens (batch, *grid), False = padding, which is not read.
        causal: along the first axis: a token sees its frame (a step of that axis) and earlier
        frames; not with a context. layout: with a Ragged x is (length, dim) and mask (length,);
        with a Grid x may be (batch, length, dim). context: the source to read instead of x (batch,
        *source grid, context dim), if a mixer has a cross form; samples of one shape only. source: the layout of the
        context; default: the grid that it has. norm: of a mixer with `norms`, and without a context: what x + branch,
        or x without a branch, goes through first; this sum and the result are returned.
        """
        check_floats(x=x)
        check_not_wider(self, x=x)
        grid = layout or layout_of_tokens(x)
        tokens = grid.tokens(x)
        self._check_order(grid, causal)
        if causal and not self.causal_form:
            raise ValueError(f"causal=True: {type(self).__name__} has no causal form, expected causal=False")
        if context is not None:
            check_floats(context=context)
            check_not_wider(self, context=context)
            if causal:
                raise ValueError("causal=True with a context: a source is read as a whole")
            if norm is not None:
                raise ValueError("norm with a context: expected one of them")
            if grid.packed or grid.shared:  # a context has a row for each sample
                raise ValueError("layout with a context: expected whole samples of one shape, or no context")
            source = Grid.of(context) if source is None else source
            self._check_order(source)
            flat, mask = source.tokens(context), source.flatten_mask(mask)
            y = self.mix_context(tokens, grid, flat, source, mask)
        else:

            def mix(layout: Layout, x: Tensor, mask: Tensor | None) -> Any:
                return self.mix(x, layout, mask, causal, **({} if norm is None else {"norm": norm, "branch": branch}))

            if grid.shared and not self.mergeable:
                raise ValueError(
                    f"layout={grid}: {type(self).__name__} takes whole samples; expected a mixer "
                    "whose memories can be merged, such as LightNetAttention"
                )
            mask = grid.flatten_mask(mask)
            at_once = self.ragged and grid.joint
            if norm is not None:
                stream, y = mix(grid, tokens, mask)
                return stream.reshape(x.shape), y.reshape(x.shape)
            y = mix(grid, tokens, mask) if at_once else grid.map_samples(mix, tokens, mask)
        return y.reshape(x.shape)

    def _check_order(self, layout: Layout, causal: bool = False) -> None:
        """Raise ValueError for points if the mixer would read them in the order that they happen to have."""
        if not layout.ordered and (causal or not self.order_free):
            what = "causal=True" if causal else f"{type(self).__name__} as it is set"
            raise ValueError(
                f"layout={layout}: {what} reads tokens in an order, and points have none; expected causal=False and a "
                "mixer without one, such as {'LightNetAttention': {'local': None}} or 'SoftmaxAttention'"
            )

    if TYPE_CHECKING:  # what an editor knows of a call; of a Module's it knows nothing

        def __call__(
            self,
            x: Tensor,
            *,
            mask: Tensor | None = None,
            causal: bool = False,
            layout: Layout | None = None,
            context: Tensor | None = None,
            source: Grid | None = None,
        ) -> Tensor: ...

    @abstractmethod
    def mix(self, x: Tensor, layout: Any, mask: Tensor | None, causal: bool) -> Tensor:
        """Map tokens (batch, length, dim) to the same shape. layout: a Grid, or with `ragged` any
        Layout. mask: bool (batch, length), False = padding."""

    def mix_context(self, x: Tensor, grid: Any, context: Tensor, source: Grid, mask: Tensor | None) -> Tensor:
        """Cross form: tokens (batch, length, dim) on `grid` read a context (batch, source length,
        context dim) on the grid `source`. mask: of the context."""
        raise ValueError(f"context: {type(self).__name__} has no cross form")

    def summarize_source(self, context: Tensor, source: Grid, mask: Tensor | None) -> tuple[Any, ...]:
        """Return what `read_source` reads of a context (batch, source length, context dim), as often as it is called:
        tensors with a row for each sample, or None. Here it is the context and its mask; a mixer for which less
        suffices, or some of the work can be done once, overrides both methods."""
        return context, mask

    def read_source(self, x: Tensor, grid: Any, summary: tuple[Any, ...], source: Grid) -> Tensor:
        """Return `mix_context` for the context of a summary."""
        context, mask = summary
        return self.mix_context(x, grid, context, source, mask)

    def values(self, x: Tensor) -> Tensor:
        """Map tokens (batch, length, dim) to what the mixer moves between tokens (batch, length,
        channels), each from its own token: v_proj(x), or x itself without a v_proj."""
        proj = getattr(self, "v_proj", None)
        return x if proj is None else proj(x)

    def output_map(self, values: Tensor) -> Tensor:
        """Map the channels of `values` to those of a token, linearly, as the mixer maps what was
        read: by the weight of o_proj, or not at all without an o_proj."""
        proj = getattr(self, "o_proj", None)
        return values if proj is None else nn.functional.linear(values, proj.weight)

    def scale_weights(self) -> None:
        """Scale weights that were just initialised, if the mixer's arguments ask for that."""

    @property
    def state_size(self) -> int | None:
        """Count of numbers in the causal form's state of a sequence; None if it grows with it."""
        return None

    def implementation(self, x: Tensor, causal: bool = False) -> str:
        """Return what forward(x, causal=causal) would run on now (dtype, autocast, gradients):
        "torch", or the kernels' name; with the reason where kernels do not run."""
        return "torch"


class StreamingMixer(Mixer):
    """A mixer whose causal form can advance frame by frame with a state that does not grow."""

    @abstractmethod
    def init_state(self, batch: int, device: Device = None, space: Space = ()) -> Any:
        """Return the state before the first frame: a tuple of tensors with a row for each sample,
        or of such tuples. space: shape of a frame."""

    @abstractmethod
    def step(self, x: Tensor, grid: Grid, state: Any) -> tuple[Tensor, Any]:
        """Map the next frames, tokens (batch, length, dim) on a grid with an offset, and the state
        before them to the causal form's result and the state after them."""

    def advance(self, x: Tensor, state: Any, position: int | Tensor, layout: Grid | None = None) -> tuple[Tensor, Any]:
        """Map the next frames (batch, frames, *space, dim) in the causal form. Return the result
        and the next state. position: number of frames before them, an int or (batch,)."""
        grid = (layout or layout_of_tokens(x)).after(position)
        y, state = self.step(grid.flatten(x), grid, state)
        return y.reshape(x.shape), state

    @property
    def state_size(self) -> int:
        try:
            leaves = tree_leaves(self.init_state(1))
        except ValueError as error:  # a window for each of several axes; hasattr, which torch.jit
            raise AttributeError(f"state_size: of one axis only, {error}") from error  # asks, fails
        return sum(x.numel() * (2 if x.is_complex() else 1) for x in leaves)


# A function of the width that returns a mixer, or its name in the catalogue, alone or with arguments, {name:
# arguments}; or one for each layer. jsonargparse reads names from YAML, and functions as a dotted name or a class_path
# with init_args. With the tuple first jsonargparse also writes lists back, and lays a single option over a class.
Factory = Callable[[int], nn.Module]
Named = Factory | str | dict[str, Any]
Factories = tuple[Factory, ...] | Named | Sequence[Named]


def build_mixer(factory: Named, dim: int, *, dims: int | None, layer: int, causal: bool | None = None) -> nn.Module:
    """Return factory(dim), called with the keyword arguments `dims` (number of axes; None: of the cross form),
    `layer` (index of the layer), `causal` (whether its causal form is called) and, for the cross form, `context_dim`
    (channels of the source, `dim`) as well, each if the factory's signature names it and it is not None. A
    `functools.partial` may set them itself, to anything but None."""
    factory = _factory("mixer", factory)
    settings = getattr(factory, "keywords", {})  # of a partial; jsonargparse gives it all defaults
    named = {*inspect.signature(factory).parameters, *settings}
    options = {"dims": dims, "layer": layer, "causal": causal, "context_dim": dim if dims is None else None}
    missing = {key: n for key, n in options.items() if n is not None and key in named and settings.get(key) is None}
    build: Callable[..., nn.Module] = factory
    mixer = build(dim, **missing)
    if causal and not getattr(mixer, "causal_form", True):
        raise ValueError(f"causal=True: {type(mixer).__name__} has no causal form, expected another mixer")
    return mixer


def layer_factories(
    name: str, mixer: Factories, layers: int, dims: int | None, first: int = 0, causal: bool | None = None
) -> list[Factory]:
    """Return a function of the width for each of `layers` layers, which calls `build_mixer` with
    the layer's index, `first` for the first one.

    mixer: the argument `name` of a network: one function for all layers, or a list of one for each.
    Raises ValueError for anything else.
    """
    one = callable(mixer) or isinstance(mixer, str | dict)
    each: Any = [mixer] * layers if one else mixer
    names = [name if one else f"{name}[{i}]" for i in range(layers)]
    if not isinstance(each, list | tuple):
        raise ValueError(f"{name}={mixer!r}: expected {_FACTORY}, or a list of one for each layer")
    if len(each) != layers:
        raise ValueError(f"{name}: a list of {len(each)}, expected one for each of {layers} layers")
    return [
        partial(build_mixer, _factory(label, mixer), dims=dims, layer=first + i, causal=causal)
        for i, (label, mixer) in enumerate(zip(names, each, strict=True))
    ]


def _factory(label: str, mixer: Any) -> Factory:
    if callable(mixer) and unwrapped(mixer)[0] is nn.Module:
        # jsonargparse reads {name: arguments} as arguments of nn.Module, and cannot write it back
        name, *_ = [*unwrapped(mixer)[1], "NAME"]
        raise ValueError(f"{label}: in YAML expected a name, or {{class_path: {name}, init_args: {{...}}}}")
    if isinstance(mixer, str | dict):
        return named_mixer(label, mixer)
    if isinstance(mixer, nn.Module) or not callable(mixer):
        value = f"{type(mixer).__name__}(...)" if isinstance(mixer, nn.Module) else repr(mixer)
        raise ValueError(f"{label}={value}: expected {_FACTORY}")
    kind, settings = unwrapped(mixer)
    if settings and (key := catalogue_name(kind)):
        named_mixer(label, {key: settings})  # refuses arguments that it has not
    return mixer


_FACTORY = (
    "a name such as 'GLA', {'GLA': {'heads': 4}}, a class or a function of the width, such as "
    "functools.partial(LightNetAttention, heads=4)"
)


def default_heads(dim: int, heads: int | None, width: int = 64) -> tuple[int, int]:
    """Return (heads, head_dim). Default: the largest number of heads that divides `dim` with
    `width` channels or more each, at least 1."""
    check_integers(1, dim=dim)
    if heads is None:
        heads = max(h for h in range(1, max(1, dim // width) + 1) if dim % h == 0)
    if heads < 1 or dim % heads:
        raise ValueError(f"heads={heads}: expected a divisor of dim={dim}")
    return heads, dim // heads


def streaming(mixer: nn.Module) -> Any:
    """Return a mixer that has the methods of a StreamingMixer. Raises ValueError for any other."""
    if not hasattr(mixer, "advance"):
        raise ValueError(f"{type(mixer).__name__} has no method advance: it cannot go frame by frame")
    return mixer


def reads_context(mixer: nn.Module | type[nn.Module]) -> bool:
    """Return whether a mixer, or the mixers of a class, have a cross form."""
    kind = mixer if isinstance(mixer, type) else type(mixer)
    if issubclass(kind, Mixer):
        return kind.mix_context is not Mixer.mix_context
    return "context" in inspect.signature(kind.forward).parameters


def check_axes(grid: Grid, source: Grid, remedy: str = "") -> None:
    """Check that x and a context have as many axes, as a position code in both needs."""
    if source.ndim != grid.ndim:
        raise ValueError(
            f"context on a grid {source.shape}, x on {grid.shape}: they share coordinates and need as many axes{remedy}"
        )


def projected_like(x: Tensor, *shape: int) -> Tensor:
    """Return an empty tensor like a projection of x: its dtype under autocast, its gradients."""
    return torch.empty(0, *shape, dtype=product_dtype(x), device=x.device).requires_grad_(torch.is_grad_enabled())


def zero_padding(mask: Tensor | None, *xs: Tensor) -> tuple[Tensor, ...]:
    """Return each x (batch, length, ...) with 0 where mask (batch, length) is False, so that even
    NaN in the padding cannot leak."""
    if mask is None:
        return xs
    return tuple(x.masked_fill(~expand_to(mask, x), 0) for x in xs)


def expand_to(tokens: Tensor, x: Tensor) -> Tensor:
    """Expand a value for each token (batch, length) to the shape of x (batch, length, ...)."""
    return tokens.reshape(*tokens.shape, *[1] * (x.ndim - 2)).expand_as(x)
