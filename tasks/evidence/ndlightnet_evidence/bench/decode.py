"""Times of decoding, one token at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops import State, attention_step
from ndlightnet_evidence.bench import peers
from ndlightnet_evidence.bench.attention import make_lrpe
from ndlightnet_evidence.bench.rows import Bench, Case, Contender


def decode(bench: Bench, batch: int = 64, heads: int = 12, dim: int = 64) -> None:
    """Time a step of a batch of sequences. Floor: the State read and written, and the token."""
    for kind in (None, "cosine"):
        case = Case("step, cosine" if kind else "step", batch, 1, heads, dim)
        lrpe = make_lrpe(bench, "cosine", (1,), heads, dim) if kind else None
        rows = 2 * dim if kind else dim

        def inputs(rows: int = rows) -> tuple[Tensor, ...]:
            tokens = torch.randn(3, batch, heads, dim, device=bench.device, dtype=torch.bfloat16)
            top = torch.randn(batch, heads, dim, device=bench.device)
            memory = torch.randn(batch, heads, rows, dim, device=bench.device)
            return *tokens, top, 1 + top.abs(), memory

        step = partial(_step, position=lrpe)
        ours, torch_form = partial(step, impl=bench.impl), partial(step, impl="torch")
        tokens, state = 4 * case.numel() * 2, batch * heads * dim * (2 + rows) * 4
        contenders = [
            Contender("ours", ours),
            Contender("ours", ours, graph=False),
            Contender("compile", peers.compiled(torch_form)),
        ]
        bench.compare(case, "fwd", contenders, inputs, tokens + 2 * state)


def _step(q: Tensor, k: Tensor, v: Tensor, *state: Tensor, impl: Any, **options: Any) -> Any:
    return attention_step(q, k, v, State(*state), impl=impl, **options)
