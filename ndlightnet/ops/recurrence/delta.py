"""The delta rule: plain (DeltaNet), with a decay for each head (gated DeltaNet) or for each key
channel (Kimi Delta Attention):

    p_t = Diag(exp(l_t)) m_(t-1),  u_t = beta_t (v_t - p_t^T k_t),  m_t = p_t + k_t u_t^T,
    y_t = m_t^T q_t

that is m_t = (I - beta_t k_t k_t^T) Diag(exp(l_t)) m_(t-1) + beta_t k_t v_t^T: one step of gradient
descent, with rate beta_t, towards a memory that maps k_t to v_t.

Chunkwise: all u of a chunk solve one triangular system (the WY representation); the memories before
the chunks come from one scan over affine maps. The gradient is explicit. No exponent is positive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops import fla
from ndlightnet.ops.dispatch import Impl, resolve
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.recurrence import memory
from ndlightnet.ops.recurrence.chunks import Decay, exact, from_chunks, inverse, matmul_as, to_chunks, work_dtype
from ndlightnet.ops.recurrence.gated import after, check, chunkwise, log_decay_gradient
from ndlightnet.ops.recurrence.scan import MATRIX, adjoints, before, memories

fla.declare("gated_delta_rule")


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Run the delta rule causally, from the memory `state` to the last memory.

    q, k (batch, length, heads, dim), keys of norm 1 (the caller normalises them); v (batch, length, heads, value_dim);
    beta (batch, length, heads) in [0, 1], or up to 2, where a memory's sign can change; log_decay, state, impl and the
    returned values as in `gated_linear_attention`. A token with beta = 0 and log_decay = 0 changes nothing.
    """
    decay, state = check(q, k, v, log_decay, state)
    if tuple(beta.shape) != tuple(k.shape[:3]):
        raise ValueError(f"beta {tuple(beta.shape)}: expected (batch, length, heads), {tuple(k.shape[:3])}")
    chosen = resolve("gated_delta_rule", impl, k, v, decay, q, beta, state)
    if q.shape[1] == 0:
        return empty_result(v, q, k, beta, log_decay), state
    with exact(k):
        if chosen == "reference":
            kx, bx = k.to(state.dtype), beta.to(state.dtype)[..., None]
            transition = torch.eye(k.shape[-1], dtype=kx.dtype, device=k.device)
            transition = transition - (bx * kx)[..., None] * kx[..., None, :]
            if decay is not None:
                transition = transition * decay.exp()[..., None, :]
            return memory.reference(q, bx * kx, transition, v, state, torch.matmul)
        if chosen == "fla":
            return fla.gated_delta_rule(q, k, v, beta, decay, state)
        y, last = _run(q, k, v, beta, decay, state)
    return y, last


class _Delta:
    """Values shared by forward and backward, all (batch * heads, chunks, ...)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None, state: Tensor) -> None:
        acc, work = state.dtype, work_dtype(v)
        self.q, self.k, self.v = (to_chunks(x, work) for x in (q, k, v))
        self.first = state.flatten(0, 1)
        self.beta = to_chunks(beta[..., None], acc)
        self.d = Decay(None if decay is None else to_chunks(decay, acc))
        self.kk = self.d.scores(self.k, self.k, acc).tril(-1)
        self.qk = self.d.scores(self.q, self.k)
        self.solve = inverse(self.beta * self.kk)
        self.write = self.d.out(self.k)
        solved = (self.solve * self.beta.mT).to(work)  # maps values to u
        self.w, self.u0 = solved @ self.d.into(self.k), solved @ self.v
        # a chunk maps the memory m to `transition` m + write^T u0
        over, eye = self.d.over(), torch.eye(k.shape[-1], dtype=acc, device=k.device)
        self.transition = eye if over is None else over * eye
        self.transition = self.transition - matmul_as(self.write.mT, self.w, acc)

    def run(self) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the memory after each chunk."""
        m = memories(self.transition, matmul_as(self.write.mT, self.u0, self.first.dtype), self.first, MATRIX)
        start = before(m, self.first, self.q.dtype)
        return self.d.into(self.q) @ start + self.qk @ (self.u0 - self.w @ start), m

    def backward(self, inputs: Sequence[Any], m: Tensor, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        c, acc = self, m.dtype
        beta, decay, state = inputs[3:]
        work, dyc, d = c.q.dtype, to_chunks(dy, c.q.dtype), c.d
        start = before(m, c.first, work)
        u = c.u0 - c.w @ start
        du = c.qk.mT @ dyc  # without the part from later chunks
        read_grad = (d.into(c.q).mT @ dyc - c.w.mT @ du).to(acc)
        dm = adjoints(c.transition, after(read_grad), dlast.flatten(0, 1), MATRIX)
        dstate = c.transition[:, 0].mT @ dm[:, 0] + read_grad[:, 0]
        lam = c.solve.mT @ (du + c.write @ dm.to(work)).to(acc)
        dv = (c.beta * lam).to(work)
        dlower = -(lam @ u.mT.to(acc)).tril(-1)
        right = c.v - d.into(c.k) @ start
        dbeta = (lam * right).sum(-1, keepdim=True) + (dlower * c.kk).sum(-1, keepdim=True)
        da = dyc @ u.mT
        dq, dk = d.scores_backward(da, c.q, c.k)
        read, written = d.scores_backward((c.beta * dlower).to(work), c.k, c.k)
        dq = dq + d.into(dyc @ start.mT)
        read = read - d.into(dv @ start.mT)
        written = written + dk + d.out(u @ dm.mT.to(work))
        dl = None
        if decay is not None:
            diagonal = c.q * dq.to(acc) + c.k * (read.to(acc) - written.to(acc))
            dl = log_decay_gradient(decay, diagonal, dm * m)
        diagonal = da.diagonal(dim1=-2, dim2=-1)[..., None]
        dq, written = dq + diagonal * c.k, written + diagonal * c.q
        grads = (from_chunks(x, inputs[2]) for x in (dq, read + written, dv))
        return (*grads, from_chunks(dbeta, beta)[..., 0], dl, dstate.view_as(state))


_run = chunkwise(_Delta)
