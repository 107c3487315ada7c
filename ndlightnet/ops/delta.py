"""The delta rule: plain (DeltaNet), with a decay for each head (gated DeltaNet) or for each key
channel (Kimi Delta Attention):

    p_t = Diag(exp(l_t)) m_(t-1),  u_t = beta_t (v_t - p_t^T k_t),  m_t = p_t + k_t u_t^T,
    y_t = m_t^T q_t

that is m_t = (I - beta_t k_t k_t^T) Diag(exp(l_t)) m_(t-1) + beta_t k_t v_t^T: one step of gradient
descent, with rate beta_t, towards a memory that answers k_t with v_t.

Chunkwise: all u of a chunk solve one triangular system (the WY representation), the memories before
the chunks come from one scan over affine maps. The gradient is explicit. No exponent is positive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops import _fla, memory
from ndlightnet.ops._fla import Impl
from ndlightnet.ops.chunks import (
    exact,
    from_chunks,
    inverse,
    later_first,
    scores,
    scores_backward,
    to_chunks,
)
from ndlightnet.ops.gated import check
from ndlightnet.ops.scan import adjoints, before, memories


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None,
    state: Tensor | None = None, *, impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal, from a memory to a memory.

    q, k (batch, length, heads, dim), keys of length 1 (the caller normalises them); v (batch,
    length, heads, value_dim); beta (batch, length, heads) in [0, 1], or to 2: then a memory's sign
    can turn; log_decay, state, impl, and what is returned as in `gated_linear_attention`. A token
    with beta = 0 and log_decay = 0 changes nothing.
    """
    decay, state = check(q, k, v, log_decay, state)
    if tuple(beta.shape) != tuple(k.shape[:3]):
        raise ValueError(
            f"beta {tuple(beta.shape)}: expected (batch, length, heads), {tuple(k.shape[:3])}"
        )
    chosen = _fla.choose(impl, "gated_delta_rule", k, v)
    if q.shape[1] == 0:
        return torch.zeros_like(v), state
    with exact(k):
        if chosen == "reference":
            kx, bx = k.to(decay.dtype), beta.to(decay.dtype)[..., None]
            erase = torch.eye(k.shape[-1], dtype=kx.dtype, device=k.device)
            erase = erase - (bx * kx)[..., None] * kx[..., None, :]
            forget = erase * decay.exp()[..., None, :]
            return memory.reference(q, bx * kx, forget, v, state, torch.matmul)
        if chosen == "fla":
            given = None if log_decay is None else decay
            return _fla.gated_delta_rule(q, k, v, beta, given, state)
        y, last = _Delta.apply(q, k, v, beta, decay, state)  # type: ignore[no-untyped-call]
    return y, last


class _Chunks:
    """What both passes need, all (batch, chunks, heads, ...)."""

    def __init__(self, *given: Tensor) -> None:
        q, k, v, beta, decay = given
        acc = decay.dtype
        self.q, self.k, self.v, l = (to_chunks(x, acc) for x in (q, k, v, decay))
        self.beta = to_chunks(beta[..., None], acc)
        self.g = l.cumsum(-2)
        self.end = self.g[..., -1:, :]
        self.into, self.out = self.g.exp(), (self.end - self.g).exp()
        self.kk = scores(self.k, self.k, self.g).tril(-1)
        self.qk = scores(self.q, self.k, self.g)
        self.solve = inverse(self.beta * self.kk)
        seen, self.write = self.k * self.into, self.k * self.out
        turned = self.solve * self.beta.mT  # of values to u
        self.w, self.u0 = turned @ seen, turned @ self.v
        # a chunk takes the memory m to `keep` m + write^T u0
        keep = torch.diag_embed(self.end.exp().expand(*self.end.shape[:-1], k.shape[-1])[..., 0, :])
        self.keep = keep - self.write.mT @ self.w


class _Delta(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        c = _Chunks(q, k, v, beta, decay)
        m = memories(c.keep, c.write.mT @ c.u0, state, torch.matmul)
        start = before(m, state)
        y = (c.q * c.into) @ start + c.qk @ (c.u0 - c.w @ start)
        ctx.save_for_backward(q, k, v, beta, decay, state, m)
        return from_chunks(y, q.shape[1], v.dtype), m[:, -1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *given, state, m = ctx.saved_tensors
        with exact(m):
            return _backward(tuple(given), state, m, *grads)


def _backward(
    given: tuple[Tensor, ...], state: Tensor, m: Tensor, dy: Tensor, dlast: Tensor
) -> tuple[Tensor, ...]:
    n, dyc = dy.shape[1], to_chunks(dy, m.dtype)
    c, start = _Chunks(*given), before(m, state)
    u = c.u0 - c.w @ start
    du = c.qk.mT @ dyc  # without what comes by later chunks
    pull = (c.q * c.into).mT @ dyc - c.w.mT @ du
    dm = adjoints(c.keep, torch.cat([pull[:, 1:], torch.zeros_like(pull[:, :1])], 1), dlast,
                  torch.matmul)  # fmt: skip
    dstate = c.keep[:, 0].mT @ dm[:, 0] + pull[:, 0]
    lam = c.solve.mT @ (du + c.write @ dm)
    dv = c.beta * lam
    dlower = -(lam @ u.mT).tril(-1)
    right = c.v - (c.k * c.into) @ start
    dbeta = (lam * right).sum(-1, keepdim=True) + (dlower * c.kk).sum(-1, keepdim=True)
    dq, dk = scores_backward((dyc @ u.mT).tril(), c.q, c.k, c.g)
    read, written = scores_backward(c.beta * dlower, c.k, c.k, c.g)
    dq = dq + (dyc @ start.mT) * c.into
    read = read - (dv @ start.mT) * c.into
    written = written + dk + (u @ dm.mT) * c.out
    dl, held = c.q * dq + c.k * (read - written), (dm * m).sum(-1)[..., None, :]
    if c.g.shape[-1] == 1:
        dl, held = dl.sum(-1, keepdim=True), held.sum(-1, keepdim=True)
    dl = later_first(dl) + held
    grads = (dq, read + written, dv, dbeta, dl)
    like = (*given[:3], given[3][..., None], given[4])
    out = [from_chunks(x, n, given.dtype) for x, given in zip(grads, like, strict=True)]
    return (*out[:3], out[3][..., 0], out[4], dstate)
