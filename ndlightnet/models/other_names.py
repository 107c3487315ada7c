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
    parameters = list(signature(init).parameters)[1:]
    names = {alias: name for pair in SAME for name, alias in (pair, pair[::-1]) if name in parameters}

    @wraps(init)
    def renamed(self: Any, *args: Any, **options: Any) -> None:
        for alias in [name for name in options if name in names]:
            name, value = names[alias], options.pop(alias)
            if name in options or name in parameters[: len(args)]:
                raise ValueError(f"{alias}={value!r} beside {name}: expected one of the two names")
            options[name] = value
        init(self, *args, **options)

    return renamed  # type: ignore[return-value]
