"""Networks whose logits are means over mirrored copies of the input, or over folds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from torch import Tensor, nn


def mirrorings(axes: Sequence[int]) -> list[list[int]]:
    """Return the dimensions to flip for each way to mirror `(batch, channels, *space)` along some
    of the spatial `axes`, or none."""
    counts = range(len(axes) + 1)
    return [[2 + axis for axis in some] for count in counts for some in combinations(axes, count)]


class Mirrored(nn.Module):
    """The mean of a network's logits over mirrored copies of the input, one after the other: every
    subset of the spatial `axes` (0 is the first after the channels), `2 ** len(axes)` forwards."""

    def __init__(self, net: nn.Module, axes: Sequence[int]) -> None:
        super().__init__()
        if len(set(axes)) != len(axes) or any(axis < 0 for axis in axes):
            raise ValueError(f"axes={axes!r}: expected different axes, counted from 0")
        self.net, self.axes = net, tuple(axes)
        _pass_channels(self, [net])

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, channels, *space)` to `(batch, classes, *space)`, in the network's dtype."""
        ways = mirrorings(self.axes)
        return _mean((self.net(x.flip(dims)).flip(dims) for dims in ways), len(ways))


class OutOfCore(nn.Module):
    """A network whose features lie on the host, for volumes larger than its device: see
    `predict_large` of NDLightNet and NDLightUNet. The result is on the host."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        if not hasattr(net, "predict_large"):
            raise ValueError(
                f"out_of_core=True: {type(net).__name__} has no predict_large, expected an NDLightNet or NDLightUNet"
            )
        self.net = net
        _pass_channels(self, [net])

    def forward(self, x: Tensor) -> Tensor:
        net: Any = self.net
        result: Tensor = net.predict_large(x)
        return result


class Ensemble(nn.Module):
    """The mean of the logits of several networks (folds), one after the other."""

    def __init__(self, nets: Sequence[nn.Module]) -> None:
        super().__init__()
        if not nets:
            raise ValueError("nets=[]: expected at least one network")
        self.nets = nn.ModuleList(nets)
        _pass_channels(self, nets)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, channels, *space)` to `(batch, classes, *space)`, in the networks' dtype."""
        return _mean((net(x) for net in self.nets), len(self.nets))


def _mean(logits: Iterable[Tensor], count: int) -> Tensor:
    """Return the mean of `count` tensors that are made one at a time."""
    each = iter(logits)
    total = next(each) / count  # a new tensor: a network may return its input
    for more in each:
        total.add_(more, alpha=1 / count)
    return total


def _pass_channels(module: nn.Module, nets: Sequence[nn.Module]) -> None:
    """Set the `in_channels` and `out_channels` of `module` to those of its networks, if any."""
    for name in ("in_channels", "out_channels"):
        values = {getattr(net, name) for net in nets if hasattr(net, name)}
        if len(values) > 1:
            raise ValueError(f"networks: {name} {sorted(values)}, expected one for all")
        for value in values:
            setattr(module, name, value)
