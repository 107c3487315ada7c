"""Times of the kernels of a call, by name, and their sums: where a step on several GPUs takes longer than on one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ndlightnet_evidence import tables
from ndlightnet_evidence.tables import Run

LARGEST, NAME = 25, 100  # rows of a table, letters of a name


def kernels(call: Callable[[], Any]) -> list[Run]:
    """Return name, part, number and milliseconds of the kernels of a call, of an operator on a CPU, the longest first.
    NCCL's kernels have the names of its operations, and wait in them for other processes."""
    on_card = torch.cuda.is_available()
    activity, kind = (ProfilerActivity.CUDA, "CUDA") if on_card else (ProfilerActivity.CPU, "CPU")
    with profile(activities=[activity]) as profiled:
        call()
        if on_card:
            torch.cuda.synchronize()
    tpe = {
        name
        for module in sys.modules
        if module.startswith("ndlightnet_kernels.axis_")
        for name in vars(sys.modules[module])
    }
    rows: list[Run] = []
    for event in profiled.key_averages():
        if event.device_type.name == kind and not event.is_user_annotation:
            name, us = event.key, event.self_device_time_total if on_card else event.self_cpu_time_total
            part = "communication" if "nccl" in name.lower() else "MD-TPE" if name in tpe else "rest"
            rows.append({"kernel": name, "part": part, "calls": event.count, "ms": us / 1e3})
    return sorted(rows, key=lambda row: -row["ms"])


def table(rows: Sequence[Run], alone: Sequence[Run], share: float) -> str:
    """Return a table of the kernels that take the most beyond their share of what they take on one GPU alone."""
    times = {row["kernel"]: row["ms"] for row in alone}
    rows = [{**row, "beyond": row["ms"] - share * times.get(row["kernel"], 0.0)} for row in rows]
    largest = sorted(rows, key=lambda row: -row["beyond"])[:LARGEST]
    return tables.of_records([{**row, "kernel": row["kernel"][:NAME]} for row in largest])


def sums(rows: Sequence[Run]) -> Run:
    """Return the milliseconds of each part."""
    return {
        f"{part} ms": sum(row["ms"] for row in rows if row["part"] == part)
        for part in ("communication", "MD-TPE", "rest")
    }
