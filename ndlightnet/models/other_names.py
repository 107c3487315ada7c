"""One name for one thing, with the other library's name accepted: timm says `in_chans` where MONAI
says `in_channels`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

SAME = (("dims", "spatial_dims"), ("in_chans", "in_channels"), ("num_classes", "out_channels"))
Init = TypeVar("Init", bound=Callable[..., None])


def accept_other_names(init: Init) -> Init:
    """Let an `__init__` take the other name of each pair in SAME as a keyword, too.

    The signature stays that of `init`: YAML files, editors and type checkers know one name for one
    thing. It is the outermost decorator: those inside see the names of the signature only.
    Raises ValueError if both names of a pair are given.
    """
    known = list(signature(init).parameters)[1:]
    names = {other: name for pair in SAME for name, other in (pair, pair[::-1]) if name in known}

    @wraps(init)
    def renamed(self: Any, *args: Any, **options: Any) -> None:
        for other in [name for name in options if name in names]:
            name, value = names[other], options.pop(other)
            if name in options or name in known[: len(args)]:
                raise ValueError(f"{other}={value!r} beside {name}: expected one of the two names")
            options[name] = value
        init(self, *args, **options)

    return renamed  # type: ignore[return-value]
