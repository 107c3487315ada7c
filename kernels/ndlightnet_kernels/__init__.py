"""Triton kernels of ndlightnet, found by name: `impl="triton"` asks for an attribute called as the
operation of ndlightnet.ops (`summarize`, `read`, `causal_attention`). None is here yet."""
