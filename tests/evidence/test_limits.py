"""The command `limits`, what of it needs no card: the arithmetic of its tables, its processes."""

import sys
from types import SimpleNamespace

import pytest
import torch

import limits
from ndlightnet_evidence import gpu_processes, kernel_times

from .job import job


@pytest.mark.slow
@pytest.mark.parametrize(
    "count, end, answer",
    [
        (2, "", {"n": 6, "world": 2}),
        (2, "fails", {"error": "MemoryError: no memory left"}),
        (1, "dies", {"error": "processes ended with [3]"}),
    ],
)
def test_processes_answer_or_say_why_not(count, end, answer, capfd):
    """They end by themselves, without a group and without a word on it, unless one of them fails."""
    assert gpu_processes.launch(count, job, n=3, end=end) == answer
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith(("  ", "Traceback"))]
    assert lines == {"": ["no group"] * 2, "fails": ["MemoryError: no memory left"], "dies": []}[end]


@pytest.mark.parametrize("largest, gpus, tries", [(448, 1, 1), (448, 2, 1), (96, 1, 1), (384, 2, 3), (384, 4, 2)])
def test_the_largest_cube_is_the_first_that_fits(monkeypatch, largest, gpus, tries):
    properties = SimpleNamespace(total_memory=100e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    tried = []

    def measure(sides, search=False):
        if not search:
            return {str(side): {"gb": 2 + 1000 * side**3 / 1e9} for side in sides}
        tried.append(sides)
        fit = [side for side in sides if side <= largest]
        return {str(fit[0]): {"gb": 3.0}} if fit else {"error": "out of memory"}

    cube = limits.largest_cube(measure, gpus)
    assert cube["largest"] == largest and cube["gb"] == 3.0 and cube["bytes a voxel"] == pytest.approx(1000)
    assert tried[0][0] == 448 and len(tried) == tries  # the third root of 1e8 is 464
    assert limits.largest_cube(lambda **_: {"error": "boom"}, 1) == {"error": "boom"}


def test_kernels_of_a_call_by_part(monkeypatch):
    """On a CPU operators; the names of MD-TPE's are those in its modules, of communication NCCL's."""
    monkeypatch.setitem(sys.modules, "ndlightnet_kernels.axis_x", SimpleNamespace(**{"aten::cumsum": None}))

    def call():
        with torch.profiler.record_function("ncclDevKernel_AllReduce"):
            torch.ones(99).cumsum(0)

    rows = kernel_times.kernels(call)
    parts = {row["kernel"]: row["part"] for row in rows}
    assert parts["aten::cumsum"] == "MD-TPE" and parts["aten::fill_"] == "rest"
    assert "ncclDevKernel_AllReduce" not in parts  # a range, whose kernels have their own rows
    assert [row["ms"] for row in rows] == sorted((row["ms"] for row in rows), reverse=True)
    total = kernel_times.sums(rows)
    assert total["MD-TPE ms"] > 0 and sum(total.values()) == pytest.approx(sum(row["ms"] for row in rows))


def test_scaling_is_compared_with_one_card(monkeypatch, tmp_path, capsys):
    launched = []

    def launch(gpus, job, grid, batch, profile):
        launched.append((gpus, tuple(grid)))
        kernels = [{"kernel": f"k{n}", "part": "rest", "calls": 1, "ms": 1.0} for n in range(30)]
        kernels[-1]["ms"] += gpus - 1
        return {
            "graph ms": {1: 25, 2: 31.25, 4: 50}[gpus] * batch * grid[0] / 32,
            **({"kernels": kernels} if profile else {}),
        }

    monkeypatch.setattr(gpu_processes, "launch", launch)
    limits.main(
        ["scaling", "--gpus", "1", "4", "--grid", "8", "4", "--batch", "2", "--profile", "--out", str(tmp_path)]
    )
    assert launched == [(1, (8, 4)), (4, (8, 4)), (4, (2, 4))]
    printed = capsys.readouterr().out
    assert "rest ms 33" in printed
    strong = printed.split("strong, 4 GPUs:\n")[1].splitlines()  # 2 of 8 planes: a quarter of the work
    assert [cell.strip() for cell in strong[2].split("|")[1:-1]] == ["k29", "rest", "1", "4", "3.75"]
    assert "| k23 " in strong[26] and not strong[27]
    launched.clear()
    limits.main(["scaling", "--gpus", "1", "0", "--out", str(tmp_path)])  # as without a card
    assert launched == [(1, (32, 64, 64))]
    capsys.readouterr()
    launched.clear()
    limits.main(["scaling", "--gpus", "1", "2", "--out", str(tmp_path)])
    assert launched == [(1, (32, 64, 64)), (2, (32, 64, 64)), (2, (16, 64, 64))]
    lines = [line.split("|") for line in (tmp_path / "scaling.md").read_text().splitlines()]
    table = [dict(zip(map(str.strip, lines[0]), map(str.strip, line), strict=True)) for line in lines[2:]]
    assert [row["efficiency"] for row in table] == ["", "0.8", "0.8"]
    assert [row["tokens"] for row in table] == ["524288", "1048576", "524288"]
    limits.main(["model", "--out", str(tmp_path)])
    predicted = {line.split("|")[1].strip(): line for line in (tmp_path / "model.md").read_text().splitlines()}
    assert "0.9533" in predicted["8"] and "0.8307" in predicted["64"]  # as kernels/README.md says
    assert "1409" in predicted["8"] and predicted["8"] in capsys.readouterr().out
