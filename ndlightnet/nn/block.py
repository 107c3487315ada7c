"""Block: the residual pair of a mixer and a gated MLP, with stochastic depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ndlightnet.layout import Grid, Layout
from ndlightnet.nn.initial import Device, Initialized, Space, owners
from ndlightnet.nn.mixers.base import Mixer, streaming
from ndlightnet.nn.projections import fuses, hooked, joins, joint_linear, norm_linear, residual_norm
from ndlightnet.ops import swiglu
from ndlightnet.parallel import layout_of_tokens


class DropPath(nn.Module):
    """Drops a sample's whole branch with probability `p` in training and rescales the others."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"drop_path={p}: expected 0 <= p < 1")
        self.p = p

    def forward(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        """Drop samples of x (batch, ...), or with a layout (batch, length, dim), in training."""
        if not self.training or self.p == 0:
            return x
        grid = layout or Grid(tuple(x.shape[1:-1]))
        mask = grid.draw(grid.samples(len(x)), *[1] * (x.ndim - 2), device=x.device) >= self.p
        return x * grid.spread_samples(mask) / (1 - self.p)


WIDTHS = 8  # hidden widths are multiples of it: 16-bit matrix units and tensor parallel need that
RATIO = 8 / 3  # hidden width of a gated MLP / dim: as many parameters as an MLP of 4 dim without a gate


class GLU(Initialized):
    """Gated MLP: down(SiLU(gate x) * up x), without biases; hidden = 8/3 dim, rounded to the
    nearest multiple of 8. Parameters: 3 * dim * hidden."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = max(WIDTHS, int(dim * RATIO / WIDTHS + 0.5) * WIDTHS)
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if joins(x, self.gate_proj, self.up_proj, self.down_proj):
            return swiglu(joint_linear(x, self.gate_proj, self.up_proj), self.down_proj.weight)
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def map_after(mlp: nn.Module, x: Tensor, y: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the residual stream x + y, and the map of its norm by a GLU or another module, such as a wrapped one."""
    if type(mlp) is GLU and joins(x, mlp.gate_proj, mlp.up_proj, mlp.down_proj) and not hooked(mlp):
        x, hidden = norm_linear(x, y, norm, mlp.gate_proj, mlp.up_proj)
        return x, swiglu(hidden, mlp.down_proj.weight)
    x, normed = residual_norm(x, y, norm)
    return x, mlp(normed)


def mix(mixer: nn.Module, x: Tensor, mask: Tensor | None, causal: bool, layout: Layout) -> Tensor:
    """Apply a mixer, or another module that is called like one, to tokens (batch, length, dim)."""
    if isinstance(mixer, Mixer) or layout.packed:  # a pack has no form without its layout
        return mixer(x, mask=mask, causal=causal, layout=layout)
    # a module that is not a Mixer may not accept a layout
    mask = None if mask is None else layout.unflatten(mask)
    return layout.flatten(mixer(layout.unflatten(x), mask=mask, causal=causal))


def mix_after(
    mixer: nn.Module, x: Tensor, y: Tensor | None, norm: nn.Module, mask: Tensor | None, causal: bool, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return the residual stream x + y, or x without y, and what a mixer makes of its norm."""
    if getattr(mixer, "norms", False) and layout.joint and fuses(x, norm) and not hooked(mixer):
        pair: tuple[Tensor, Tensor] = mixer(x, mask=mask, causal=causal, layout=layout, norm=norm, branch=y)
        return pair
    x, normed = residual_norm(x, y, norm)
    return x, mix(mixer, normed, mask, causal, layout)


class Block(Initialized):
    """Residual block: x + mixer(norm x), then x + mlp(norm x), with dropout and stochastic depth of both."""

    def __init__(
        self, dim: int, mixer: Callable[[int], nn.Module], drop_path: float = 0.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.mixer = mixer(dim)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = GLU(dim)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()  # torch's draws a mask for 0, too
        self.drop_path = DropPath(drop_path)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
        layout: Layout | None = None,
        branch: Tensor | None = None,
        apart: bool = False,
    ) -> Any:
        """Map tokens (batch, *grid, dim) to the same shape. mask: bool (batch, *grid), False = padding. With a layout
        tokens may also be (batch, length, dim), mask (batch, length); a pack is (length, dim). branch: what is still
        to be added to x. apart: the result is such a pair, which the norm of the next block adds on the way."""
        grid = layout or layout_of_tokens(x)
        y, mask = grid.tokens(x), grid.flatten_mask(mask)
        branch = None if branch is None else grid.tokens(branch)
        y, branch = mix_after(self.mixer, y, branch, self.norm1, mask, causal, grid)
        y, branch = map_after(self.mlp, y, self.drop_path(self.dropout(branch), grid), self.norm2)
        branch = self.drop_path(self.dropout(branch), grid)
        return (y.reshape(x.shape), branch.reshape(x.shape)) if apart else (y + branch).reshape(x.shape)

    def init_state(self, batch: int, device: Device = None, space: Space = ()) -> Any:
        """Return the mixer's state before the first frame, of shape `space`, for `advance`."""
        return streaming(self.mixer).init_state(batch, device, space)

    def advance(self, x: Tensor, state: Any, position: Tensor, layout: Grid | None = None) -> tuple[Tensor, Any]:
        """Map the next frames (batch, frames, *space, dim) in the causal form. Return the result
        and the next state. state: after the `position` (batch,) frames so far."""
        _, normed = residual_norm(x, None, self.norm1)
        y, state = streaming(self.mixer).advance(normed, state, position, layout)
        x, y = map_after(self.mlp, x, self.drop_path(self.dropout(y)), self.norm2)
        return x + self.drop_path(self.dropout(y)), state


def undecayed_names(net: nn.Module) -> set[str]:
    """Return the names of parameters that weight decay would distort: decays, angles, orthogonal
    vectors. A module lists the names of such parameters in `undecayed`."""
    return {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in net.named_modules()
        for name in getattr(module, "undecayed", ())
    }


def init_network(*modules: nn.Module, leave_out: Sequence[nn.Module] = ()) -> None:
    """Apply `init_weights` to all modules within but those to leave out, tied parameters once."""
    for _, module in owners(*modules, leave_out=leave_out):
        init_weights(module)


def init_weights(module: nn.Module) -> None:
    """Initialise a layer (`Module.apply`, which takes a module after its parts): Xavier for linear
    maps, small normal for embeddings, then what a mixer scales."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, Mixer):
        module.scale_weights()
