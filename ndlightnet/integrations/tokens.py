"""A mixer in the place of another library's attention layer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid
from ndlightnet.nn.block import init_network
from ndlightnet.nn.initial import Initialized
from ndlightnet.nn.mixers.base import Mixer, Named, build_mixer
from ndlightnet.nn.mixers.lightnet import LightNetAttention

Shape = tuple[int, ...]
GridSource = Shape | Callable[[], Shape]  # a shape, or a function that asks the network for it
ONE_MEMORY = (
    "LightNet has one memory for all queries, which cannot hide different keys from different "
    "queries or heads: expected padding, causal attention or a sliding window"
)
HIDDEN = -1e3  # biases up to this hide a key: libraries write -10000, or the least number


def make_mixer(
    dim: int,
    heads: int,
    mixer: Named | None,
    *,
    dims: int | None,
    layer: int = 0,
    causal: bool = False,
    context_dim: int | None = None,
    bias: bool = True,
) -> Mixer:
    """Return a mixer of tokens with `dim` channels on a grid of `dims` axes. Arguments as in
    TokenMixer; without `dims` the default mixer does not mix locally."""
    if mixer is None:
        mixer = partial(LightNetAttention, heads=heads, lrpe=None, bias=bias, context_dim=context_dim)
    layer_mixer = build_mixer(mixer, dim, dims=dims, layer=layer, causal=causal)
    if not isinstance(layer_mixer, Mixer):
        raise ValueError(f"mixer: makes a {type(layer_mixer).__name__}, expected a Mixer")
    init_network(layer_mixer)
    return layer_mixer


class TokenMixer(Initialized):
    """A mixer on the tokens (batch, length, dim) of a network that knows no layouts.

    Where the grid of the tokens is known, the mixer runs on it, behind `prefix` tokens such as a class token. These
    take part in LightNet attention, and have no neighbours; all other mixers read prefix and grid as one sequence.

    Args:
        dim: channels of a token.
        heads: of the layer that is replaced; used by the default mixer.
        mixer: a name or a function of the width that returns a Mixer, as for NDLightNet. Default:
            LightNet attention with `heads` heads and `bias`, without position code, as a network of
            another library has its own; it mixes locally if the tokens have a grid or an order.
        grid: shape of the grid of the tokens behind the prefix. A function is asked at every call.
        prefix: number of tokens in front of the grid.
        sequence: whether tokens without a grid are in an order, as words are: then they have
            neighbours. A causal layer's always are.
        causal: whether the causal form is called.
        layer: index of the layer, for mixers that ask for it.
        context_dim: channels of the source, if the layer reads another one; a mixer reads `dim`.
        bias: biases in the default mixer's projections.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mixer: Named | None = None,
        *,
        grid: GridSource | None = None,
        prefix: int = 0,
        sequence: bool = False,
        causal: bool = False,
        layer: int = 0,
        context_dim: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        dims = None
        if grid is not None:
            dims = len(grid() if callable(grid) else grid)
        elif context_dim is None and (mixer is not None or sequence or causal):
            dims = 1
        build = partial(make_mixer, dim, heads, mixer, layer=layer, causal=causal, context_dim=context_dim, bias=bias)
        self.mixer = build(dims=dims)
        if grid is not None and prefix and not isinstance(self.mixer, LightNetAttention):
            grid, self.mixer = None, build(dims=1)
        self.grid, self.prefix = grid, prefix if grid is not None else 0
        self.ordered = dims is not None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init_network(self.mixer)

    @property
    def shape(self) -> Shape | None:
        """Return the shape of the grid of the tokens, None if they have none."""
        shape = self.grid() if callable(self.grid) else self.grid
        return None if shape is None else tuple(shape)

    def layout(self, length: int) -> Grid:
        """Return the grid of `length` tokens, without the prefix."""
        if (shape := self.shape) is None:
            return Grid((length,))
        grid = Grid(shape)
        if length != self.prefix + grid.length:
            raise ValueError(
                f"{length} tokens: expected {self.prefix + grid.length}, a grid {grid.shape}"
                + (f" behind {self.prefix}" if self.prefix else "")
            )
        return grid

    def forward(
        self, x: Tensor, mask: Tensor | None = None, causal: bool = False, context: Tensor | None = None
    ) -> Tensor:
        """Map tokens (batch, length, dim) to the same shape. mask: bool over the tokens that are
        read, (batch, length), False = padding. causal: a token sees itself and the tokens before
        it; not on a grid of several axes. context: the source to read (batch, source, channels)."""
        grid = self.layout(x.shape[1])
        if causal and (grid.ndim > 1 or self.prefix):
            raise ValueError(
                f"causal=True: the tokens are on a grid {grid.shape} and mix with neighbours that "
                "come later; expected a layer without a grid"
            )
        if causal and context is not None:
            raise ValueError("causal=True with a context: expected a layer that reads its own tokens")
        mixer: Any = self.mixer
        y: Tensor
        if context is not None:
            y = mixer(x, mask=mask, context=context)
        elif self.prefix:
            y = mixer.mix(x, grid, mask, causal, self.prefix)
        else:
            y = mixer(x, mask=mask, causal=causal, layout=grid)
        return y

    def what(self) -> str:
        """Describe the mixer and what it runs on, for a report."""
        name = type(self.mixer).__name__
        if self.shape is None:
            return f"{name} on {'the sequence of tokens' if self.ordered else 'a set of tokens'}"
        behind = f" behind {self.prefix} token{'s' * (self.prefix > 1)}" if self.prefix else ""
        return f"{name} on a grid {self.shape}{behind}"


class HiddenStatesMixer(nn.Module):
    """A mixer with the call of a self-attention layer of transformers or diffusers: hidden states (batch, length, dim)
    and padding, to hidden states. Keyword arguments that are neither None, False nor `harmless` are refused."""

    def __init__(self, mixer: TokenMixer, harmless: Collection[str] = ()) -> None:
        super().__init__()
        self.mixer, self.harmless = mixer, harmless

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
        refused = [
            name for name, x in options.items() if x is not None and x is not False and name not in self.harmless
        ]
        if refused:
            raise ValueError(f"{', '.join(refused)}: a mixer takes hidden states and padding")
        return self.mixer(hidden_states, padding(attention_mask, *hidden_states.shape[:2]))


def require(allowed: bool | Tensor, text: str) -> None:
    """Raise ValueError with the text unless `allowed`; of a Tensor in a compiled graph, when it runs."""
    if isinstance(allowed, Tensor) and torch.compiler.is_compiling():
        torch._assert_async(allowed, text)
    elif not allowed:
        raise ValueError(text)


def padding(mask: Tensor | None, batch: int, keys: int, heads: int = 1, name: str = "attention_mask") -> Tensor | None:
    """Return another library's mask of scores as bool (batch, keys), True = data.

    mask: (batch, keys), (batch, queries, keys) or (batch, heads, queries, keys), each with 1 in the
    place of batch, heads or queries: libraries write padding out, so that values are compared. Bool
    or integers, 0 = padding, or a bias of 0 and less than -1000. Raises ValueError for a mask that
    hides different keys from different queries or heads, and for other biases.
    """
    if mask is None:
        return None
    shape = tuple(mask.shape)
    rows = mask[:, None, None] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask
    if rows.ndim != 4 or rows.shape[0] not in (1, batch) or rows.shape[1] not in (1, heads) or rows.shape[3] != keys:
        raise ValueError(f"{name} {shape}: {ONE_MEMORY}, of ({batch}, {keys}) keys")
    visible = rows.bool()
    if mask.is_floating_point():
        visible = rows > HIDDEN
        require((~visible | (rows == 0)).all(), f"{name} {mask.dtype}: expected 0, or -10000 and less for padding")
    first = visible[:, :1, :1]
    require((visible == first).all(), f"{name} {shape}: {ONE_MEMORY}")
    return first[:, 0, 0].expand(batch, -1)
