"""Functions on tensors, without parameters: the forms of attention, MD-TPE, MD-LRPE, and the memory
recurrences of other mixers."""

from ndlightnet.ops.add_norm import add_norm
from ndlightnet.ops.axis_scan import axis_scan, line_scan, line_state, line_step
from ndlightnet.ops.dispatch import Support, supported
from ndlightnet.ops.instance_norm import instance_norm_silu
from ndlightnet.ops.lightnet.attention import attention_step, causal_attention, global_attention, read, summarize
from ndlightnet.ops.lightnet.frames import axis_causal_attention
from ndlightnet.ops.lightnet.layer import attention_layer
from ndlightnet.ops.lightnet.sdpa import lightnet_attention
from ndlightnet.ops.lightnet.state import State, merge
from ndlightnet.ops.local_mixing import dense, local_mixing, local_mixing_step, star
from ndlightnet.ops.norm_gate import norm_gate
from ndlightnet.ops.position import Position, frequencies, rotate, tables
from ndlightnet.ops.recurrence.delta import gated_delta_rule
from ndlightnet.ops.recurrence.gated import gated_linear_attention
from ndlightnet.ops.recurrence.memory import elementwise_memory, matrix_memory
from ndlightnet.ops.recurrence.scan import scan
from ndlightnet.ops.swiglu import swiglu
from ndlightnet.ops.toeplitz import toeplitz

__all__ = [
    "Position",
    "State",
    "Support",
    "add_norm",
    "attention_layer",
    "attention_step",
    "axis_causal_attention",
    "axis_scan",
    "causal_attention",
    "dense",
    "elementwise_memory",
    "frequencies",
    "gated_delta_rule",
    "gated_linear_attention",
    "global_attention",
    "instance_norm_silu",
    "lightnet_attention",
    "line_scan",
    "line_state",
    "line_step",
    "local_mixing",
    "local_mixing_step",
    "matrix_memory",
    "merge",
    "norm_gate",
    "read",
    "rotate",
    "scan",
    "star",
    "summarize",
    "supported",
    "swiglu",
    "tables",
    "toeplitz",
]
