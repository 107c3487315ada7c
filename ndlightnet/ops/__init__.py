"""Functions on tensors, without parameters: attention in its forms, MD-TPE, MD-LRPE, and the memory
recurrences of other mixers."""

from ndlightnet.ops._support import Support, supported
from ndlightnet.ops.attention import (
    attention_step,
    causal_attention,
    global_attention,
    read,
    summarize,
)
from ndlightnet.ops.axis_scan import axis_scan, line_scan, line_state, line_step
from ndlightnet.ops.frames import axis_causal_attention
from ndlightnet.ops.gate import norm_gate
from ndlightnet.ops.lrpe import Lrpe, frequencies, rotate, tables
from ndlightnet.ops.packed import (
    packed_attention,
    packed_axis_causal_attention,
    packed_axis_scan,
)
from ndlightnet.ops.recurrence.delta import gated_delta_rule
from ndlightnet.ops.recurrence.gated import gated_linear_attention
from ndlightnet.ops.recurrence.memory import elementwise_memory, matrix_memory
from ndlightnet.ops.recurrence.scan import scan
from ndlightnet.ops.state import State, merge

__all__ = [
    "Lrpe",
    "State",
    "Support",
    "attention_step",
    "axis_causal_attention",
    "axis_scan",
    "causal_attention",
    "elementwise_memory",
    "frequencies",
    "gated_delta_rule",
    "gated_linear_attention",
    "global_attention",
    "line_scan",
    "line_state",
    "line_step",
    "matrix_memory",
    "merge",
    "norm_gate",
    "packed_attention",
    "packed_axis_causal_attention",
    "packed_axis_scan",
    "read",
    "rotate",
    "scan",
    "summarize",
    "supported",
    "tables",
]
