"""Mixers by name, as configs hold them: "GLA", or {"GLA": {"scan": "axes"}} with arguments.

Only names of the catalogue are known: nothing that a file says is imported. Any other mixer is
written down as {"custom": its name}, which tells a reader what to pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral, Real
from typing import Any

from ndlightnet.layout.spelling import did_you_mean

CATALOGUE: dict[str, Callable[..., Any]] = {}  # filled by the package, from its exports
CUSTOM = "custom"
GIVEN = ("dims", "layer", "causal")  # what networks give to a mixer, see build_mixer


def _expected(word: str, words: list[str]) -> str:
    near = did_you_mean(word, words, "")
    hint = f"did you mean {near!r}? " if near else ""
    return f"{hint}expected one of {', '.join(words)}"


def named_mixer(label: str, mixer: str | Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function of the width that a name, or {name: arguments}, stands for.

    `{"class_path": name, "init_args": arguments}` is accepted, too, and names with "ndlightnet.nn.mixers." before them.
    label: the argument's name in errors. Raises ValueError for a name or an argument that the catalogue has not.
    """
    arguments: Any = None
    if isinstance(mixer, str):
        name = mixer
    elif "class_path" in mixer:
        name, arguments = mixer["class_path"], mixer.get("init_args")
    elif len(mixer) == 1:
        ((name, arguments),) = mixer.items()
        if name == CUSTOM:
            raise ValueError(f"{label}: {arguments}, which is not a mixer of ndlightnet; pass it as {label}=...")
    else:
        raise ValueError(f"{label}={dict(mixer)!r}: expected a name, or {{name: arguments}}")
    short = str(name).rsplit(".", 1)[-1]
    if short not in CATALOGUE or name not in (short, f"ndlightnet.nn.mixers.{short}"):
        words = sorted(CATALOGUE, key=str.lower)
        raise ValueError(f"{label}={name!r}: {_expected(short, words)}")
    factory, arguments = CATALOGUE[short], arguments or {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{label}={{{short!r}: {arguments!r}}}: expected arguments by name")
    names = [key for key in inspect.signature(factory).parameters if key != "dim"]
    for key in arguments:
        if key not in names:
            raise ValueError(f"{label}: {short} has no {key!r}, {_expected(key, names)}")
    return partial(factory, **arguments) if arguments else factory


def unwrapped(mixer: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the class or function of a functools.partial, and its arguments. The partials that
    jsonargparse makes call its own functions, with the class as their last argument. Any other one
    with positional arguments is returned as it is: no names describe what it makes."""
    if not isinstance(mixer, partial):
        return mixer, {}
    if str(getattr(mixer.func, "__module__", "")).startswith("jsonargparse"):
        return mixer.args[-1], mixer.keywords
    return (mixer, {}) if mixer.args else (mixer.func, mixer.keywords)


def catalogue_name(factory: Any) -> str | None:
    """Return the name of a class or function in the catalogue; None for any other."""
    return next((key for key, one in CATALOGUE.items() if one is factory), None)


def description(mixer: Callable[..., Any]) -> Any:
    """Return the JSON form of a function that makes mixers: name, or {name: all its arguments}."""
    factory, settings = unwrapped(mixer)
    name = catalogue_name(factory)
    if name is None:
        factory = factory.func if isinstance(factory, partial) else factory
        called = getattr(factory, "__qualname__", type(factory).__name__)
        return {CUSTOM: f"{getattr(factory, '__module__', '?')}.{called}"}
    empty = inspect.Parameter.empty
    parameters = inspect.signature(factory).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not empty}
    arguments = {
        key: described(value) if key == "mixer" else jsonable(value) for key, value in {**defaults, **settings}.items()
    }
    for key in GIVEN:
        if arguments.get(key, "") is None:
            del arguments[key]
    return {name: arguments} if arguments else name


def described(mixer: Any) -> Any:
    """Return the JSON form of an argument `mixer`: of one, of a list of them, or None."""
    if isinstance(mixer, list | tuple):
        return [described(one) for one in mixer]
    if isinstance(mixer, dict) and mixer.keys() == {CUSTOM}:
        return mixer  # it has this form
    if isinstance(mixer, str | dict):
        mixer = named_mixer("mixer", mixer)
    return None if mixer is None else description(mixer)


def jsonable(value: Any) -> Any:
    """Return the JSON form of an argument; {"custom": its type's name} where it has none."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, list | tuple):
        return [jsonable(one) for one in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: jsonable(one) for key, one in value.items()}
    if callable(value):
        return description(value)
    return {CUSTOM: f"{type(value).__module__}.{type(value).__qualname__}"}


def customs(value: Any) -> list[str]:
    """Return the names in a JSON form for which it has no value."""
    if isinstance(value, list):
        return [name for one in value for name in customs(one)]
    if not isinstance(value, dict):
        return []
    if value.keys() == {CUSTOM}:
        return [str(value[CUSTOM])]
    return [name for one in value.values() for name in customs(one)]
