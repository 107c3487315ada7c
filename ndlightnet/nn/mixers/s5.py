"""S5 (Smith, Warrington and Linderman, 2023, arXiv 2208.04933): one linear system for all channels."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlightnet.layout.abstract import check_integers
from ndlightnet.nn.initial import Device, assign
from ndlightnet.nn.mixers.recurrent import Recurrent, Scan, exclude_self
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.recurrence import ssm
from ndlightnet.ops.recurrence.chunks import exact
from ndlightnet.ops.recurrence.scan import scan as linear_scan


class S5(Recurrent):
    """S5: h * sigmoid(gate_proj(h)), h = GELU(y + D * u), y one linear system of all inputs u:
    x_t = exp(dt a) x_(t-1) + expm1(dt a) / a B u_t, y_t = 2 Re C x_t, diagonal and complex, with a
    step dt for each state; the eigenvalues a are those of HiPPO-LegS at first.

    Args:
        dim: channels of a token.
        state: real size of the state: state / 2 conjugate pairs.
        scan: how a grid is covered; see Recurrent.

    Parameters: dim^2 + 2 state dim + dim + 3 state / 2.
    """

    undecayed = ("A_log", "A_imag")

    def __init__(self, dim: int, state: int = 64, *, scan: Scan = "both") -> None:
        super().__init__(scan)
        check_integers(1, dim=dim)
        self.width = dim
        self.state, exact = state, torch.float32
        pairs = ssm.pairs(state)
        self.A_log = nn.Parameter(torch.empty(pairs, dtype=exact))
        self.A_imag = nn.Parameter(torch.empty(pairs, dtype=exact))
        self.log_dt = nn.Parameter(torch.empty(pairs))
        self.B = nn.Parameter(torch.empty(dim, pairs, 2, dtype=exact))  # real, imaginary
        self.C = nn.Parameter(torch.empty(dim, pairs, 2, dtype=exact))
        self.D = nn.Parameter(torch.empty(dim))
        self.gate_proj = nn.Linear(dim, dim, bias=False)
        self.reset_own()

    @torch.no_grad()
    def reset_own(self) -> None:
        eigenvalues, vectors = ssm.legs(self.state)
        assign(self.A_log, (-eigenvalues.real).log())
        assign(self.A_imag, eigenvalues.imag)
        self.log_dt.uniform_(math.log(1e-3), math.log(0.1))
        # normal in HiPPO's coordinates, then changed to those of its eigenvectors
        dim, state, on = self.width, self.state, self.B.device
        vectors = vectors.to(on, torch.complex64)
        b = torch.randn(dim, state, device=on) / math.sqrt(dim)
        c = torch.randn(dim, state, dtype=torch.complex64, device=on) * math.sqrt(2 / state)
        assign(self.B, torch.view_as_real(b.to(c.dtype) @ vectors.conj()))
        assign(self.C, torch.view_as_real(c @ vectors))
        self.D.normal_()

    def system(self) -> tuple[Tensor, Tensor]:
        """Return exp(dt a) (state / 2,) and expm1(dt a) / a B (dim, state / 2), complex128."""
        z = ssm.discretize(self.A_log, self.A_imag, self.log_dt)
        gain = self.log_dt.double().exp() * ssm.zero_order_hold(z)
        return z.exp(), gain * torch.view_as_complex(self.B.double())

    def inputs(self, z: Tensor, mask: Tensor | None) -> Tensor:
        return z

    def recur(self, inputs: Tensor, memory: Tensor, inclusive: int) -> tuple[Tensor, Tensor]:
        u, acc, n = inputs, accumulator(inputs), inputs.shape[1]
        decay, b = (x.to(memory.dtype) for x in self.system())
        with exact(u):
            added = u.to(acc) @ torch.view_as_real(b).flatten(1)
            added = torch.view_as_complex(added.unflatten(-1, (-1, 2)))
            x = linear_scan(decay.expand(1, 1, -1), added, memory)
            last = x[:, -1] if n else memory
            read = torch.view_as_real(exclude_self(x, inclusive, lambda n: added[n])).flatten(2)
            # the real part of the product, times 2 for both states of a conjugate pair
            c = 2 * torch.view_as_real(torch.view_as_complex(self.C.to(acc)).conj_physical())
            return (read @ c.flatten(1).mT).to(u.dtype), last

    def output(self, inputs: Tensor, y: Tensor) -> Tensor:
        h = F.gelu(y + self.D * inputs)
        return h * torch.sigmoid(self.gate_proj(h))

    def initial_memory(self, batch: int, device: Device) -> Tensor:
        dtype = ssm.COMPLEX[accumulator(self.D)]
        return torch.zeros(batch, *self.A_imag.shape, dtype=dtype, device=device)
