"""Base of networks: arguments that JSON holds, other libraries' names for them, initial values, weight decay."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar, TypeVar

import torch

from ndlightnet.layout.spelling import did_you_mean
from ndlightnet.nn.block import init_network, undecayed_names
from ndlightnet.nn.initial import Initialized, reset
from ndlightnet.nn.mixers.names import described, jsonable

PLACE = ("device", "dtype")
MIXERS = ("mixer", "decoder_mixer", "cross")  # arguments that are mixers, where a text is a name
Init = TypeVar("Init", bound=Callable[..., None])
# one name for one thing, with that of MONAI accepted where timm has another, and the other way round
SAME = (("dims", "spatial_dims"), ("in_chans", "in_channels"), ("num_classes", "out_channels"))


class Config(dict[str, Any]):
    """A dictionary with what transformers' Trainer asks of any network's `config`: it sets
    attributes of it (`use_cache`), and its loggers call these methods."""

    def to_dict(self) -> dict[str, Any]:
        return dict(self)

    def to_json_string(self) -> str:
        return json.dumps(self, indent=2)


class Configured(Initialized):
    """Base class of networks that know their arguments, can be initialised again and say what weight decay leaves
    alone. Constructors have the decorator `recorded`; those of subclasses are recorded without it."""

    # what other changes of a network leave as it is, see `record`
    usual: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        init = vars(cls).get("__init__")
        if init is not None and not hasattr(init, "records"):
            inherited = signature(super(cls, cls).__init__)
            cls.__init__ = _noting(init, list(inherited.parameters)[1:])  # type: ignore[method-assign]

    def reset_parameters(self) -> None:
        """Initialise all parameters and buffers as the constructor does, such as after `to_empty` of a network built
        on device "meta"; parts that are networks first, which their constructors have initialised."""
        networks = [part for part in self.children() if isinstance(part, Configured)]
        for network in networks:
            network.reset_parameters()
        reset(self, leave_out=networks)
        init_network(self, leave_out=networks)

    def no_weight_decay(self) -> set[str]:
        """Return the names of decays, angles and the like, which weight decay would distort."""
        return undecayed_names(self)

    @property
    def config(self) -> Config:
        """The constructor's arguments, all of them, so that a later change of a default does not
        change the network: `type(net)(**net.config)` has the same layers, with new weights.

        JSON holds it: a mixer is its name, or {name: all its arguments}. A mixer that is not of
        ndlightnet is {"custom": its name}, which no constructor takes.
        """
        return Config(deepcopy(vars(self).get("_config", {})))

    def record(self, **changes: Any) -> None:
        """Note arguments that now describe the network, after a method has changed it. What no
        argument of the constructor describes is noted, too, unless it is `usual`."""
        if "_config" not in vars(self):
            return  # the constructor is not done, and its arguments say it
        config, beyond = vars(self)["_config"], vars(self)["_beyond"]
        for name, value in changes.items():
            if name in config or name not in self.usual:
                config[name] = _form(name, value)
            elif value != self.usual[name]:
                beyond[name] = value
            else:
                beyond.pop(name, None)


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


def recorded(init: Init) -> Init:
    """Let a network's `__init__` note its arguments, and take two more: `device`, where it is built, and `dtype`, which
    the network is then converted to, as by `to`.

    The signature shows neither of these two: they are no options of a YAML file. Type checkers read them in the source.
    """
    full = signature(init)
    options = [p for name, p in full.parameters.items() if name not in PLACE]
    passes_on = any(p.kind is Parameter.VAR_KEYWORD for p in options)  # to a base class, which checks them

    @wraps(init)
    def placed(self: Any, *args: Any, device: Any = None, dtype: Any = None, **more: Any) -> None:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype={dtype!r}: expected a torch.dtype, such as torch.float32")
        for name in more:
            if name not in full.parameters and not passes_on:
                network, names = init.__qualname__.split(".")[0], list(full.parameters)[1:]  # not that of a subclass
                raise TypeError(f"{network} has no argument {name}{did_you_mean(name, names)}")
        with nullcontext() if device is None else torch.device(device):
            init(self, *args, **more)
        if dtype is not None:
            self.to(dtype)

    placed.__signature__ = full.replace(parameters=options)  # type: ignore[attr-defined]
    return _noting(placed)  # type: ignore[return-value]


def _noting(init: Callable[..., None], inherited: Sequence[str] = ()) -> Callable[..., None]:
    """Let an `__init__` note its arguments, unless that of a subclass has called it. inherited: the
    names of the base class's, for an `__init__` that passes on `*args`."""
    declared = signature(init)

    @wraps(init)
    def noting(self: Any, *args: Any, **options: Any) -> None:
        state = vars(self)
        if "_building" in state:
            return init(self, *args, **options)
        state["_building"] = True
        try:
            init(self, *args, **options)
        finally:
            del state["_building"]
        for name in PLACE:
            if name not in declared.parameters:
                options.pop(name, None)
        state["_config"], state["_beyond"] = _arguments(declared, args, options, inherited), {}

    noting.records = True  # type: ignore[attr-defined]
    return noting


def _arguments(declared: Signature, args: Any, options: dict[str, Any], inherited: Sequence[str]) -> dict[str, Any]:
    """Return the JSON form of all arguments of a call of an `__init__`."""
    bound = declared.bind(None, *args, **options)
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        if declared.parameters[name].kind is Parameter.VAR_KEYWORD:
            arguments.update({key: _form(key, one) for key, one in value.items()})
        elif declared.parameters[name].kind is Parameter.VAR_POSITIONAL:
            names = zip(inherited, value, strict=False)
            arguments.update({key: _form(key, one) for key, one in names})
        else:
            arguments[name] = _form(name, value)
    return arguments


def _form(name: str, value: Any) -> Any:
    form = described(value) if name in MIXERS else jsonable(value)
    try:
        json.dumps(form, allow_nan=False)
    except ValueError:  # infinity and NaN
        return {"custom": repr(value)}
    return form
