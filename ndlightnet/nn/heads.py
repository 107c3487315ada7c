"""Heads: how channels are split among them."""

from __future__ import annotations


def default_heads(dim: int, heads: int | None) -> tuple[int, int]:
    """(heads, head dim). By default the largest number that divides `dim` with 64 channels or more
    each."""
    if heads is None:
        heads = max(h for h in range(1, max(1, dim // 64) + 1) if dim % h == 0)
    if heads < 1 or dim % heads:
        raise ValueError(f"heads={heads}: expected a divisor of dim={dim}")
    return heads, dim // heads
