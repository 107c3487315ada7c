"""FLOPs of our operators for torch.utils.flop_counter: `import ndlightnet.ops.flops`, before a
FlopCounterMode is made, lets it count a network whose operators run on kernels.

As torch counts: two for each multiply-add of a product, none for element-wise work (the gate, the
GLU, merges of States), upper bounds for masks. With n tokens of all samples and heads together, key
and value channels d and e (2 d with MD-LRPE, whose memory has two halves), an operator has

    summarize, read            2 n d e      each token's keys and values join a memory, or read it
    attention, a step          4 n d e      both; what chunks cost on top in a kernel is not counted
    attention in a window w    2 n min(w, length) (d + e)    scores and their sums, as in a kernel
    MD-TPE                     4 cells axes ways states      a state of each channel decays, is read
    local mixing               2 cells taps

where cells are tokens times channels. A backward has the gradients of both factors of a product:
twice as many. Each operator declares its own.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from ndlightnet.ops._operator import FORMULAS

for _name, _formula in FORMULAS.items():
    register_flop_formula(getattr(torch.ops.ndlightnet, _name))(_formula)
