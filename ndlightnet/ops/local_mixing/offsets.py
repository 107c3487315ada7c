"""Offsets of a depthwise convolution: where each of its taps reads, relative to a token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from ndlightnet.layout.abstract import check_integers, per_axis

Offsets = tuple[tuple[int, ...], ...]


def star(ndim: int, radius: int | Sequence[int], causal: bool = False) -> Offsets:
    """Return the offsets 0 and +-1 .. +-radius along each of `ndim` axes: 2 radius ndim + 1 taps.

    radius: one for all axes, or one per axis. causal: along the first axis 1 .. 2 radius, so that
    a token reads its own frame and earlier ones with as many taps.
    """
    centre = (0,) * ndim
    offsets = [centre]
    for axis, reach in enumerate(_reaches(ndim, radius, causal)):
        offsets += [(*centre[:axis], step, *centre[axis + 1 :]) for step in reach if step]
    return tuple(offsets)


def dense(ndim: int, radius: int | Sequence[int], causal: bool = False) -> Offsets:
    """Return all offsets of the box {-radius .. radius}^ndim: (2 radius + 1)^ndim taps.

    radius: one for all axes, or one per axis. causal: along the first axis 0 .. 2 radius. The first
    axis varies fastest: kernels share what they load between such neighbours.
    """
    first, *rest = _reaches(ndim, radius, causal)
    return tuple((o[-1], *o[:-1]) for o in product(*rest, first))


def _reaches(ndim: int, radius: int | Sequence[int], causal: bool) -> list[range]:
    check_integers(1, ndim=ndim)
    radii = per_axis("radius", radius, ndim, 0)
    reaches = [range(-r, r + 1) for r in radii]
    return [range(2 * radii[0] + 1), *reaches[1:]] if causal else reaches
