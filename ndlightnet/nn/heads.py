"""Split of channels among heads."""

from __future__ import annotations


def default_heads(dim: int, heads: int | None, width: int = 64) -> tuple[int, int]:
    """Return (heads, head_dim). Default: the largest number of heads that divides `dim` with
    `width` channels or more each, at least 1."""
    if heads is None:
        heads = max(h for h in range(1, max(1, dim // width) + 1) if dim % h == 0)
    if heads < 1 or dim % heads:
        raise ValueError(f"heads={heads}: expected a divisor of dim={dim}")
    return heads, dim // heads
