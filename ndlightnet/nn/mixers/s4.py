"""S4 with diagonal systems (Gu, Goel and Re, 2022, arXiv 2111.00396; S4D, 2022, arXiv 2206.11893)."""

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


class S4(Recurrent):
    """S4: GLU(out_proj(GELU(y + D u))), where every channel y is a linear system of its input u:
    x_t = exp(dt a) x_(t-1) + expm1(dt a) / a u_t, y_t = 2 Re C x_t, diagonal and complex, with the
    eigenvalues a of HiPPO-LegS at first. (A weight B of the input would only scale C.)

    Args:
        dim: channels of a token.
        state: real size of a channel's state: state / 2 conjugate pairs.
        scan: how a grid is covered; see Recurrent.

    Parameters: 2 dim^2 + 2 state dim + 2 dim.
    """

    undecayed = ("A_log", "A_imag")

    def __init__(self, dim: int, state: int = 64, *, scan: Scan = "both") -> None:
        super().__init__(scan)
        check_integers(1, dim=dim)
        self.width = dim
        self.state = state
        pairs = (dim, ssm.pairs(state))
        self.A_log = nn.Parameter(torch.empty(pairs, dtype=torch.float32))
        self.A_imag = nn.Parameter(torch.empty(pairs, dtype=torch.float32))
        self.log_dt = nn.Parameter(torch.empty(dim))
        self.C = nn.Parameter(torch.empty(*pairs, 2))  # real, imaginary
        self.D = nn.Parameter(torch.empty(dim))
        self.out_proj = nn.Linear(dim, 2 * dim, bias=False)
        self.reset_own()

    @torch.no_grad()
    def reset_own(self) -> None:
        eigenvalues, _ = ssm.legs(self.state)
        assign(self.A_log, (-eigenvalues.real).log().repeat(self.width, 1))
        assign(self.A_imag, eigenvalues.imag.repeat(self.width, 1))
        self.log_dt.uniform_(math.log(1e-3), math.log(0.1))
        self.C.normal_().div_(math.sqrt(2))
        self.D.normal_()

    def system(self) -> tuple[Tensor, Tensor]:
        """Return dt a and the states' weights expm1(dt a) / a C: (dim, state / 2), complex128."""
        log_dt = self.log_dt[:, None]
        z = ssm.discretize(self.A_log, self.A_imag, log_dt)
        step = log_dt.double().exp()
        return z, step * ssm.zero_order_hold(z) * torch.view_as_complex(self.C.double())

    def inputs(self, z: Tensor, mask: Tensor | None) -> Tensor:
        return z

    def recur(self, inputs: Tensor, memory: Tensor, inclusive: int) -> tuple[Tensor, Tensor]:
        z, weight = self.system()
        y, memory = ssm.diagonal_ssm(inputs, z, weight, memory)
        direct = 2 * weight.real.sum(-1).to(y.dtype)
        return exclude_self(y, inclusive, lambda n: direct * inputs[n]), memory

    def output(self, inputs: Tensor, y: Tensor) -> Tensor:
        return F.glu(self.out_proj(F.gelu(y + self.D * inputs)), -1)

    def initial_memory(self, batch: int, device: Device) -> Tensor:
        dtype = ssm.COMPLEX[accumulator(self.D)]
        return torch.zeros(batch, *self.A_log.shape, dtype=dtype, device=device)
