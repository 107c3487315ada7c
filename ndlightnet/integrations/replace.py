"""replace_attention: the attention layers of a network of another library become ours.

A library takes part with a file `<library>_attention.py` here, listed in LIBRARIES. It has

    def known(module: nn.Module) -> bool
    def replacement(name, module, model, options) -> Replacement | Refusal

`known` tells whether it knows such a layer; modules are asked about from the outermost inwards, and those inside a
known one are not. `replacement` returns a new layer that takes the calls of the known `module`, called `name` in
`model`; or, if its function cannot be expressed, a Refusal with the reason. It must not change anything:
replace_attention puts all new layers in their places at the end, on the device and with the dtype and mode of the old
ones. A library's file is imported if the network has a module of that library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ndlightnet.integrations.tokens import TokenMixer
from ndlightnet.nn.mixers.base import Mixer, Named
from ndlightnet.nn.multihead import MultiheadAttention

LIBRARIES = {
    "torch": "ndlightnet.integrations.torch_attention",
    "timm": "ndlightnet.integrations.timm_attention",
    "monai": "ndlightnet.integrations.monai_attention",
    "transformers": "ndlightnet.integrations.transformers_attention",
    "diffusers": "ndlightnet.integrations.diffusers_attention",
}
Start = Literal["fresh", "weights"]
Where = str | Callable[[str, nn.Module], bool]
Projections = dict[str, tuple[Tensor, Tensor | None]]  # weight and bias of q, k, v and o


class Replacement(NamedTuple):
    """A new layer; what it is, in words, for the report; what of the old one it leaves out.

    switch: for a layer that stays and is switched with all others of a submodule of its network:
    that submodule, and what switches them, called after all new layers are in their places.
    """

    new: nn.Module
    what: str
    without: tuple[str, ...] = ()
    switch: tuple[nn.Module, Callable[[], None]] | None = None


class Refusal(NamedTuple):
    """Why a layer that a library's file knows cannot be replaced."""

    reason: str


WEIGHTS_DROPOUT = "dropout of attention weights"
UNKNOWN = Refusal("not a layer that replace_attention knows")
FIRST = "expected replace_attention first, then peft"
AROUND = Refusal(f"peft's, around a layer: {FIRST}")
ALREADY = "it has ndlightnet's attention already"


@dataclass(frozen=True)
class Options:
    """What a user asked replace_attention for, and `layer`: how many layers come before this."""

    mixer: Named | None = None
    start: Start = "fresh"
    grid: tuple[int, ...] | None = None
    prefix: int = 0
    layer: int = 0

    def tokens(self, dim: int, heads: int, **options: Any) -> TokenMixer:
        """Return the mixer for a layer; options of TokenMixer come before those of the user."""
        defaults = {"grid": self.grid, "prefix": self.prefix, "layer": self.layer}
        return TokenMixer(dim, heads, self.mixer, **defaults | options)

    def replacement(self, new: nn.Module, tokens: TokenMixer, old: Projections, *without: str) -> Replacement:
        """Return the Replacement by a layer that has the mixer `tokens`. without: what of the old
        layer it leaves out, "" for nothing."""
        return Replacement(new, tokens.what() + self.begin(tokens.mixer, old), tuple(filter(None, without)))

    def contradiction(self, grid: Sequence[int], prefix: int) -> str:
        """Return how the grid and prefix asked for differ from those that a network knows, "" if they agree."""
        if (self.grid is None or tuple(self.grid) == tuple(grid)) and self.prefix in (0, prefix):
            return ""
        arguments = f"grid={self.grid}, prefix={self.prefix}"
        return f"its network has a grid {tuple(grid)} and prefix {prefix}, and {arguments} were given"

    def begin(self, new: nn.Module, old: Projections) -> str:
        """With start="weights", copy weights and biases to the projections q_proj, k_proj, v_proj and o_proj or
        out_proj of a mixer, where shapes agree. Return what was copied, in words; "" if nothing was asked for.

        Raises ValueError if nothing fits.
        """
        if self.start == "fresh":
            return ""
        copied = []
        for name, (weight, bias) in old.items():
            to = getattr(new, f"{name}_proj", getattr(new, "out_proj", None) if name == "o" else None)
            if not isinstance(to, nn.Linear) or to.weight.shape != weight.shape:
                continue
            with torch.no_grad():
                to.weight.copy_(weight)
                if to.bias is not None:
                    to.bias.zero_() if bias is None else to.bias.copy_(bias)
            copied.append(name)
        if not copied:
            raise ValueError(
                f"start='weights': {type(new).__name__} has no projections of the old layer's "
                "shapes; expected start='fresh'"
            )
        return f", starting from {', '.join(copied)}"


def projections(**layers: nn.Linear) -> Projections:
    """Return weights and biases of the layers q, k, v and o, or of some."""
    return {name: (layer.weight, layer.bias) for name, layer in layers.items()}


def thirds(weight: Tensor, bias: Tensor | None) -> Projections:
    """Return weights and biases of a joint projection to q, k and v."""
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return dict(zip("qkv", zip(weight.chunk(3), biases, strict=True), strict=True))


@dataclass
class Report:
    """What replace_attention did. `print(report)` says it in words.

    replaced: name -> what it was and is now. left: name -> what it is, and why it stays.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for title, rows in (("replaced", self.replaced), ("left", self.left)):
            lines.append(f"{title}: {len(rows)}")
            lines += [f"  {name}: {what}" for name, what in rows.items()]
        return "\n".join(lines)


def replace_attention(
    model: nn.Module,
    mixer: Named | None = None,
    where: Where | None = None,
    *,
    start: Start = "fresh",
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
) -> Report:
    """Replace the attention layers of a network by linear ones, in place, and report what was
    replaced, what was left and why.

    Known are the layers of torch, timm, MONAI, transformers and diffusers. Where the network knows the grid of its
    tokens, the new layers run on it, with local mixing. Layers of diffusers, and those of transformers that take a
    cache, keep their weights and compute LightNet attention without its norm and gate. The new function is another one,
    so that the network is to be trained or fine-tuned. Make the optimiser afterwards:
    the new layers have new parameters, on the device and of the dtype of the old ones.

    Args:
        model: the network. It must not be an attention layer itself.
        mixer: as for NDLightNet: a name ("GLA"), {name: arguments}, or a function of the width. Default: LightNet
            attention with as many heads as the old layer and without position code.
        where: which layers: a glob pattern of names ("blocks.[0-5].*"), or a function of name and
            module. Default: all that can be replaced.
        start: "fresh": new weights. "weights": q, k, v and o begin with those of the old layer,
            where shapes agree. This is a start, not equality: they were trained for softmax scores.
        grid: shape of the grid of the tokens, for networks that do not know theirs.
        prefix: number of tokens in front of that grid, such as a class token.

    Raises ValueError, before anything is changed, if no layer can be replaced, or one that `where` selects cannot.
    """
    if start not in get_args(Start):
        raise ValueError(f"start={start!r}: expected 'fresh' or 'weights'")
    options = Options(mixer, start, grid, prefix)
    if where is not None and not isinstance(where, str) and not callable(where):
        raise ValueError(f"where={where!r}: expected a glob pattern or a function(name, module)")
    report = Report()
    new: dict[str, nn.Module] = {}
    switches: dict[nn.Module, Callable[[], None]] = {}
    answers: dict[int, tuple[Replacement | Refusal, str]] = {}  # of a layer, and its first name
    for name, module, file in _layers(model):
        if not _selects(where, name, module):
            report.left[name] = f"{_kind(module)}, not selected by where={where!r}"
            continue
        if id(module) not in answers:
            answer = _answer(file, name, module, model, replace(options, layer=len(new)))
            answers[id(module)] = answer, name
        answer, first = answers[id(module)]
        if isinstance(answer, Refusal):
            if where is not None:
                raise ValueError(f"{name} is a {_kind(module)} and stays: {answer.reason}")
            report.left[name] = f"{_kind(module)}, {answer.reason}"
            continue
        new[name] = _like(answer.new, module)
        if answer.switch is not None:
            owner, switch = answer.switch
            switches[owner] = switch
        shared = "" if first == name else f", shared with {first}"
        without = f"; without its {', '.join(answer.without)}" if answer.without else ""
        report.replaced[name] = f"{_kind(module)} -> {answer.what}{shared}{without}"
    if not new:
        reasons = sorted(set(report.left.values()))
        if any(isinstance(module, Mixer | MultiheadAttention) for module in model.modules()):
            reasons.append(ALREADY)
        reason = ", ".join(reasons) or "it has no attention layers"
        raise ValueError(f"model: found nothing to replace in {_kind(model)}: {reason}")
    apart = [name for name in report.left if not switches.keys().isdisjoint(around(name, model))]
    if apart and where is not None:
        raise ValueError(
            f"where={where!r}: layers that are switched with all others of their model, expected "
            f"all of them; it leaves {', '.join(apart)}"
        )
    for name, layer in new.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
    for switch in switches.values():
        switch()
    return report


def _selects(where: Where | None, name: str, module: nn.Module) -> bool:
    """Return whether `where` means the module of a name."""
    if where is None:
        return True
    return where(name, module) if callable(where) else fnmatchcase(name, where)


def around(name: str, model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules around the module of a name, from the innermost to the model."""
    while name:
        name = name.rpartition(".")[0]
        yield model.get_submodule(name)


def tuned(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of peft, as those of LoRA, in a module, by name."""
    return {name: layer for name, layer in module.named_modules() if _is_tuned(layer)}


def _is_tuned(module: nn.Module) -> bool:
    return any(base.__name__ == "BaseTunerLayer" for base in type(module).__mro__)


def _answer(file: Any, name: str, module: nn.Module, model: nn.Module, options: Options) -> Replacement | Refusal:
    """Return what a library's file has in the place of a layer. What peft trains is not dropped."""
    if file is None:
        return AROUND if _is_tuned(module) else UNKNOWN
    answer: Replacement | Refusal = file.replacement(name, module, model, options)
    if isinstance(answer, Replacement):
        modules = set(answer.new.modules())
        if lost := [key for key, layer in tuned(module).items() if layer not in modules]:
            return Refusal(f"peft wraps its {', '.join(lost)}: {FIRST}")
    return answer


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield name and module of the layers that a library's file knows, with that file, and of those that look like
    attention: the innermost ones whose class is named so, or what peft wraps around a layer, with None."""
    present = {base.__module__.partition(".")[0] for m in model.modules() for base in type(m).__mro__}
    files = [import_module(file) for library, file in LIBRARIES.items() if library in present]

    def visit(name: str, module: nn.Module) -> list[tuple[str, nn.Module, Any]]:
        if type(module).__module__.startswith("ndlightnet."):
            return []  # one of ours already
        for file in files:
            if file.known(module):
                if module is model:
                    raise ValueError(f"model is a {_kind(module)} itself: expected a network that has one")
                return [(name, module, file)]
        inside = [
            layer
            for child, submodule in module._modules.items()  # named_children leaves shared ones out
            if submodule is not None
            for layer in visit(f"{name}.{child}".removeprefix("."), submodule)
        ]
        if inside and _is_tuned(module):
            return [(name, module, None)]
        kind = type(module).__name__.lower()
        alike = "attention" in kind or "attn" in kind
        return inside or ([(name, module, None)] if alike and module is not model else [])

    yield from visit("", model)


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__.partition('.')[0]} {type(module).__name__}"


def _like(new: nn.Module, old: nn.Module) -> nn.Module:
    """Return `new` on the device and with the dtype and mode of `old`. Modules of `old` in it stay
    as they are: they may have dtypes and modes of their own."""
    tensors = [x for x in old.parameters() if x.is_floating_point()]
    old_modules = set(old.modules())

    def moved(x: Tensor) -> Tensor:
        return x.to(tensors[0].device, tensors[0].dtype if x.is_floating_point() else None)

    for module in new.modules():
        if module not in old_modules:
            if tensors:
                module._apply(moved, recurse=False)  # type: ignore[no-untyped-call]
            module.training = old.training
    return new
