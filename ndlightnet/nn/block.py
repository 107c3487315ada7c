"""Block: the residual pair of a mixer and a gated MLP, with stochastic depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.layout import Ragged


class DropPath(nn.Module):
    """Drops a sample's whole branch with probability `p` in training and rescales the others."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"drop_path={p}: expected 0 <= p < 1")
        self.p = p

    def forward(self, x: Tensor, layout: Ragged | None = None) -> Tensor:
        if not self.training or self.p == 0:
            return x
        rows = x.shape[0] if layout is None else len(layout)
        keep = torch.rand(rows, *[1] * (x.ndim - 1), device=x.device) >= self.p
        keep = keep if layout is None else keep[layout.owners(x.device)]
        return x * keep / (1 - self.p)


class GLU(nn.Module):
    """down(SiLU(gate x) * up x), without biases. Parameters: 3 * dim * hidden."""

    def __init__(self, dim: int, ratio: float = 8 / 3) -> None:
        super().__init__()
        hidden = int(dim * ratio + 1e-6)
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """x + mixer(norm x), then x + mlp(norm x)."""

    def __init__(
        self,
        dim: int,
        mixer: Callable[[int], nn.Module],
        mlp_ratio: float = 8 / 3,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.mixer = mixer(dim)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = GLU(dim, mlp_ratio)
        self.drop_path = DropPath(drop_path)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, causal: bool = False,
        layout: Ragged | None = None,
    ) -> Tensor:  # fmt: skip
        """Tokens (batch, *grid, dim) -> same shape. mask: bool (batch, *grid), False = padding.
        layout: of samples end to end; then tokens are (length, dim)."""
        more = {} if layout is None else {"layout": layout}  # not every mixer has to know packs
        x = x + self.drop_path(self.mixer(self.norm1(x), mask=mask, causal=causal, **more), layout)
        return x + self.drop_path(self.mlp(self.norm2(x)), layout)

    def init_state(
        self, batch: int, device: torch.device | str | None = None, space: tuple[int, ...] = ()
    ) -> Any:
        """What the mixer knows before the first frame, of shape `space`, for `advance`."""
        return self._streaming().init_state(batch, device, space)

    def advance(self, x: Tensor, state: Any, position: Tensor) -> tuple[Tensor, Any]:
        """The next frames (batch, frames, *space, dim) of the causal form, and what is known of
        those before: `position` (batch,) of them."""
        y, state = self._streaming().advance(self.norm1(x), state, position)
        x = x + self.drop_path(y)
        return x + self.drop_path(self.mlp(self.norm2(x))), state

    def _streaming(self) -> Any:
        if not hasattr(self.mixer, "advance"):
            raise ValueError(
                f"{type(self.mixer).__name__} has no method advance: it cannot go frame by frame"
            )
        return self.mixer


def init_weights(module: nn.Module) -> None:
    """For `Module.apply`: Xavier for linear maps, small normal for embeddings."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
