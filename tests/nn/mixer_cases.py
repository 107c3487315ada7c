"""The mixers of the catalogue as the tests build them: small, alone and with a local branch."""

import inspect
from functools import partial

from torch import nn

from ndlightnet.nn import mixers
from ndlightnet.nn.mixers import WithLocal
from ndlightnet.nn.mixers.base import reads_context

CATALOGUE = mixers.__all__
# LightNetAttention has a branch without a wrapper
LOCAL = [*(f"{name} and a branch" for name in CATALOGUE), "LightNetAttention with its branch"]


def having(argument: str) -> list[str]:
    """Return the names of mixers that have an argument."""
    return [name for name in CATALOGUE if argument in inspect.signature(getattr(mixers, name)).parameters]


HEADS = having("heads")
CROSS = [name for name in CATALOGUE if reads_context(getattr(mixers, name))]
CAUSAL = [name for name in CATALOGUE if getattr(mixers, name).causal_form]
FORMS = [(name, causal) for name in CATALOGUE for causal in (False, True) if not causal or name in CAUSAL]
REMEMBERS = [name for name in CATALOGUE if hasattr(getattr(mixers, name), "advance")]


def build(name: str, dim: int = 16, dims: int = 1, **options) -> nn.Module:
    """Return a mixer of two heads, where it has heads. name: of CATALOGUE or LOCAL. dims: axes of a local branch."""
    name, _, branch = name.partition(" ")
    kind = partial(getattr(mixers, name), **({"heads": 2} if name in HEADS else {}), **options)
    local = {"local": "both", "radius": 2, "dims": dims}
    if branch == "with its branch":
        return kind(dim, **local)
    return WithLocal(dim, kind, **local) if branch else kind(dim)


def without_angles(mixer: nn.Module) -> nn.Module:
    """Return a mixer that reads token by token with angles of 0: the order of tokens alone counts then."""
    if hasattr(mixer, "lrpe"):
        nn.init.constant_(mixer.lrpe.log_factor, float("-inf"))
    return mixer


WINDOWS = {  # grids and windows of WindowAttention
    (7,): 3,
    (130,): 5,
    (5, 6): 2,
    (9, 20): (3, 6),
    (4, 3, 5): (2, 1, 3),
    (2, 3, 2, 4): 2,
}
LAVO_WINDOWS = {
    (1,): "auto",
    (3,): 5,
    (5,): 5,
    (23,): 5,
    (20,): 5,
    (40,): "auto",
    (7,): 1,
    (6, 4): 2,
    (9, 3): (4, 2),
    (5, 7): "auto",
    (5, 2, 3): (2, 1, 2),
    (4, 2, 1, 3): 2,
    (9,): None,
    (4, 3): None,
}
