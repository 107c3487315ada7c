"""The same work by other libraries. q, k, v and outputs (batch, length, heads, dim).

flash-linear-attention is imported when it is called: a machine without it leaves its cells empty.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, silu

from ndlightnet.nn.mixers.base import default_heads
from ndlightnet.ops import Position
from ndlightnet.ops.position import key_features, query_features
from ndlightnet.ops.recurrence import wkv
from ndlightnet_evidence.bench.timing import Absent

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}


def absent(why: str) -> Callable[..., Any]:
    def run(*_: Tensor) -> Any:
        raise Absent(why)

    return run


# ------------------------------------------------------------------------------------------ torch
def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute quadratic attention, with the kernel that torch chooses."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def backends(on_card: bool) -> dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Return, by name, what lets a call run with one of torch's kernels of softmax attention: the one that torch takes
    is not always the fastest."""

    def within(backend: SDPBackend, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with sdpa_kernel(backend):
                return run(*args)

        return call

    return {name: partial(within, backend) for name, backend in BACKENDS.items()} if on_card else {"": lambda run: run}


def reference(q: Tensor, k: Tensor, v: Tensor, position: Position | None = None) -> Tensor:
    """Compute Eq. 6 as in three lines of plain torch: softmax in float32, products in q's dtype."""
    keys, queries = k.float().softmax(1), silu(q.float())
    if position is not None:
        factors, queries = (key_features(position, k.shape[-1], keys.dtype), query_features(queries, position))
        keys = torch.cat([keys] * (factors.shape[-1] // keys.shape[-1]), -1) * factors
    memory = torch.einsum("blhr,blhd->bhrd", keys.to(v.dtype), v)
    return torch.einsum("blhr,bhrd->blhd", queries.to(q.dtype), memory)


def compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `run` for its first shape, after a reset of the compiler: otherwise a second shape
    would be compiled for all shapes, and the ninth not at all."""

    @cache
    def build() -> Callable[..., Any]:
        torch.compiler.reset()
        return torch.compile(run, dynamic=False, fullgraph=True)

    return lambda *tensors: build()(*tensors)


def flex(mask: Callable[..., Any], length: int) -> Callable[..., Any]:
    """Return compiled softmax attention with a block mask over `length` tokens."""

    @cache
    def build() -> tuple[Any, Any]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch.compiler.reset()
        make: Any = torch.compile(create_block_mask)
        return torch.compile(flex_attention, dynamic=False), make(mask, None, None, length, length, device="cuda")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend, block_mask = build()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = attend(q, k, v, block_mask=block_mask).transpose(1, 2)
        return out

    return run if torch.cuda.is_available() else absent("no CUDA device")


# ------------------------------------------------------------------------- flash-linear-attention
def fla(module: str) -> Any:
    """Import a module of flash-linear-attention. Absent if it is not installed."""
    if find_spec("fla") is None:
        raise Absent("flash-linear-attention is not installed")
    return import_module(f"fla.{module}")


def fla_lightnet(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute what fla's LightNet layer does between the projections and the norm: SiLU of the
    queries, the normaliser as a cumulative logsumexp of the keys, then fla's gated linear attention
    with the normaliser's growth as the gate. Causal."""
    scan = fla("ops.lightnet").chunk_lightnet
    out: Tensor = scan(silu(q), k, v, state_v_first=True)[0]  # as in the layer
    return out


def fla_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal linear attention, no decay, activation or normaliser: less work than ours."""
    out: Tensor = fla("ops.linear_attn").chunk_linear_attn(q, k, v, normalize=False)[0]
    return out


def fla_rwkv4(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
    """Compute RWKV-4 token by token in one kernel."""
    state = torch.zeros(k.shape[0], 3, 1, k.shape[2], device=k.device)
    state[:, 2] = wkv.LOWEST
    out: Tensor = fla("ops.rwkv4").fused_recurrent_rwkv4(decay, bonus, k, v, state)[0]
    return out


def fla_two_scans(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute lightning attention (one decay a head) over the tokens and the reversed tokens."""
    scan = fla("ops.lightning_attn").chunk_lightning_attn
    forth = scan(q, k, v, layer_idx=0, num_layers=12)[0]
    back = scan(q.flip(1), k.flip(1), v.flip(1), layer_idx=0, num_layers=12)[0]
    out: Tensor = forth + back.flip(1)
    return out


class FlaMixer(nn.Module):
    """A layer of fla as a mixer of NDLightNet: causal in row-major order."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Mix tokens (batch, *grid, dim); the output has the same shape."""
        out: Tensor = self.layer(x.flatten(1, -2))[0].reshape(x.shape)
        return out


def fla_lightnet_mixer(dim: int) -> FlaMixer:
    """Return fla's LightNet layer with the heads of ours."""
    heads, head_dim = default_heads(dim, None)
    layer = fla("layers.lightnet").LightNetAttention
    return FlaMixer(layer(hidden_size=dim, num_heads=heads, expand_ratio=None, gate_low_rank_dim=head_dim))


def fla_gated_delta_mixer(dim: int) -> FlaMixer:
    """Return fla's gated DeltaNet with the heads of ours, and values as wide as keys. Only to be timed: on Hopper cards
    fla refuses its gradients with Triton 3.4 to 3.7.0, where they are wrong (its issue 640)."""
    heads, head_dim = default_heads(dim, None)
    fla("ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
    return FlaMixer(fla("layers").GatedDeltaNet(hidden_size=dim, num_heads=heads, head_dim=head_dim, expand_v=1))


def shorten_search() -> None:
    """Let flash-linear-attention's long searches for a launch configuration try 2 and 4 warps with
    3 stages only, at every block size: all of them take ten minutes on a fresh machine."""
    try:
        fla("ops")
    except Exception:  # its rows will say why
        return
    names = [name for name in sys.modules if name.startswith("fla.ops.")]
    for kernel in [value for name in names for value in vars(sys.modules[name]).values()]:
        while kernel is not None and not isinstance(kernel, type):
            configs = getattr(kernel, "configs", None)
            if isinstance(configs, list) and len(configs) > 12:
                few = [c for c in configs if c.num_warps in (2, 4) and c.num_stages == 3]
                kernel.configs = few or configs
            kernel = getattr(kernel, "fn", None)
