"""Triton kernels of ndlightnet: torch and triton in, nothing of ours. There are none yet."""
