"""What all recurrences promise: memories are handed over, later tokens are not seen, neutral tokens change nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from ndlightnet.ops import line_scan, line_state
from ndlightnet.ops.recurrence import selective
from ndlightnet.ops.recurrence.delta import gated_delta_rule
from ndlightnet.ops.recurrence.gated import gated_linear_attention
from ndlightnet.ops.recurrence.memory import elementwise_memory, matrix_memory
from ndlightnet.ops.recurrence.ssm import diagonal_ssm
from ndlightnet.ops.recurrence.wkv import mean, merge, token, weighted_sums

draw = partial(torch.randn, dtype=torch.float64)


class Recurrence(NamedTuple):
    """inputs: of n tokens, each (batch, n, ...), by name. memory: before them. run(memory, **inputs) returns y and the
    last memory. neutral: values of inputs with which a token changes nothing."""

    inputs: Callable[[int], dict[str, Tensor]]
    memory: Tensor
    run: Callable[..., tuple[Tensor, Any]]
    neutral: dict[str, float] | None = None


def keyed(rows: int, n: int) -> dict[str, Tensor]:
    """q, k of length 1, v, beta to 2, log decay (0 to -3) of each row, of all or none."""
    inputs = {"q": draw(2, n, 2, 6), "k": normalize(draw(2, n, 2, 6), dim=-1), "v": draw(2, n, 2, 5)}
    inputs["beta"] = 2 * torch.rand(2, n, 2, dtype=torch.float64)
    return inputs | ({"log": -3 * torch.rand(2, n, 2, rows, dtype=torch.float64)} if rows else {})


def gated(impl: str, m: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Any, log: Any = None) -> Any:
    y, last = gated_linear_attention(q, k, v, log, m, impl=impl)
    return y + 0 * beta[..., None], last


def delta(impl: str, m: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log: Any = None) -> Any:
    return gated_delta_rule(q, k, v, beta, log, m, impl=impl)


def general(function: Any, m: Tensor, s: Tensor, e: Tensor, f: Tensor, i: Tensor) -> Any:
    return function(s, e, f, i, m)


def memories(last: int, complex_: bool, n: int) -> dict[str, Tensor]:
    f = torch.rand(2, n, 3, 4, last, dtype=torch.float64) / 2
    f = torch.polar(f, torch.randn_like(f)) if complex_ else f
    return {"s": draw(2, n, 3, 4), "e": draw(2, n, 3, 4), "f": f, "i": draw(2, n, 3, 5)}


def selected(m: Tensor, u: Tensor, step: Tensor, b: Tensor, c: Tensor) -> Any:
    return selective.selective_scan(u, step, -torch.linspace(0.1, 3, 12).double().view(3, 4), b, c, m)


def linear_system(m: Tensor, u: Tensor) -> Any:
    z = torch.complex(-torch.logspace(-1.7, 0, 4).double(), torch.arange(4).double()).expand(3, 4)
    return diagonal_ssm(u, z, z.sin(), m)


def weighted(m: Tensor, k: Tensor, v: Tensor) -> Any:
    decay = torch.logspace(-2, 1, 3).double()
    past, last = weighted_sums(k, v, decay[None, None], m)
    return mean(merge(past, token(k + 0.3, v))), last


def lines(m: Tensor, x: Tensor) -> Any:
    coef, decay = torch.linspace(-1, 1, 20).double().view(5, 4), torch.linspace(0.4, 0.999, 4).double().log()
    return line_scan(x, coef, decay, m), line_state(x, decay, m)


first = partial(draw, generator=torch.Generator().manual_seed(0))  # memories are drawn at the import
MEMORY = first(2, 3, 4, 5)
RECURRENCES = {
    f"{run.__name__}, {rows} decays, {impl}": Recurrence(
        partial(keyed, rows), first(2, 2, 6, 5), partial(run, impl), {"k": 0, "beta": 0, "log": 0}
    )
    for run in (gated, delta)
    for rows in (0, 1, 6)
    for impl in ("torch", "reference")
} | {
    "elementwise": Recurrence(
        partial(memories, 5, False), MEMORY, partial(general, elementwise_memory), {"e": 0, "f": 1}
    ),
    "elementwise, complex": Recurrence(
        partial(memories, 5, True), MEMORY, partial(general, elementwise_memory), {"e": 0, "f": 1}
    ),
    "matrix": Recurrence(partial(memories, 4, False), MEMORY, partial(general, matrix_memory)),
    "matrix, complex": Recurrence(partial(memories, 4, True), MEMORY, partial(general, matrix_memory)),
    "selective": Recurrence(
        lambda n: {"u": draw(2, n, 3), "step": draw(2, n, 3).abs(), "b": draw(2, n, 4), "c": draw(2, n, 4)},
        first(2, 3, 4),
        selected,
        {"step": 0},
    ),
    "linear system": Recurrence(lambda n: {"u": draw(2, n, 3)}, first(2, 3, 4).to(torch.complex128), linear_system),
    "weighted mean": Recurrence(
        lambda n: {"k": 30 * draw(2, n, 3), "v": draw(2, n, 3)},
        torch.cat([first(2, 1, 3), torch.ones(2, 2, 3).double()], 1),
        weighted,
    ),
    "lines": Recurrence(lambda n: {"x": draw(3, n, 5)}, first(3, 5, 4), lines),
}
recurrences = pytest.mark.parametrize("name", RECURRENCES)


@pytest.fixture(autouse=True)
def segments_of_seven_tokens(monkeypatch):
    monkeypatch.setattr(selective, "SEGMENT_CPU", 7 * 24)


def alike(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@recurrences
@pytest.mark.parametrize("at", [0, 1, 6, 64, 90])
def test_a_split_hands_its_memory_over(name, at):
    case = RECURRENCES[name]
    inputs = case.inputs(90)
    y, last = case.run(case.memory, **inputs)
    first, between = case.run(case.memory, **{key: x[:, :at] for key, x in inputs.items()})
    second, end = case.run(between, **{key: x[:, at:] for key, x in inputs.items()})
    alike(torch.cat([first, second], 1), y)
    alike(end, last)


@recurrences
def test_no_tokens_leave_the_memory(name):
    case = RECURRENCES[name]
    y, last = case.run(case.memory, **case.inputs(0))
    one_token, _ = case.run(case.memory, **case.inputs(1))
    assert y.shape == one_token[:, :0].shape
    assert torch.equal(last, case.memory.to(last.dtype))


@recurrences
def test_later_tokens_are_not_seen(name):
    case = RECURRENCES[name]
    inputs = {key: x.requires_grad_() for key, x in case.inputs(100).items()}
    y, _ = case.run(case.memory, **inputs)
    for t in (0, 5, 6, 7, 63, 64, 99):
        grads = torch.autograd.grad(y[:, t].square().sum(), list(inputs.values()), retain_graph=True)
        assert not any(x[:, t + 1 :].any() for x in grads)
        assert any(x[:, t].any() for x in grads) and all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("name", [name for name, case in RECURRENCES.items() if case.neutral])
def test_a_neutral_token_changes_nothing(name):
    case = RECURRENCES[name]
    keep, inputs = torch.rand(80) < 0.6, case.inputs(80)
    hidden = {key: x.clone() for key, x in inputs.items()}
    for key, value in (case.neutral or {}).items():
        if key in hidden:
            hidden[key][:, ~keep] = value
    y, last = case.run(case.memory, **hidden)
    expected, end = case.run(case.memory, **{key: x[:, keep] for key, x in inputs.items()})
    alike(y[:, keep], expected)
    alike(last, end)
