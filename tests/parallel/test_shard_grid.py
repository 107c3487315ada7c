"""Several processes that share a grid see what one process with the whole sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ndlightnet_evidence import shard_model
from tests.processes import run, run_once

from .sharded_networks import CASES, FLOAT32
from .worker import TIMEOUT

WORKER = "tests.parallel.worker"
BOUNDS = {"float32": 1e-5, "float64": 1e-10}
slow = pytest.mark.slow


def results(session: str, job: str, tmp_path: Path) -> list[dict[str, Any]]:
    """Return the results of a job of each process of a session; all sessions run once."""
    return [jobs[job] for jobs in run_once(WORKER, tmp_path, 1, "session")[0][session]]


@slow
@pytest.mark.parametrize("session", ["two", "three"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_the_whole(name, session, tmp_path):
    for errors in results(session, "all_cases", tmp_path):
        cases = {label: kinds for label, kinds in errors.items() if label.startswith(f"{name}, axis")}
        assert len(cases) == (len(CASES[name].axes) + (name in FLOAT32) if session == "two" else 1)
        for label, kinds in cases.items():
            inputs = set() if CASES[name].words else {"input"}
            assert kinds.keys() == {"output", "parameters"} | inputs
            assert max(kinds.values()) <= BOUNDS[label.rpartition(" ")[2]], (label, kinds)


@slow
@pytest.mark.parametrize(
    "session, job, count, dtype",  # count: of cases
    [
        ("two", "recomputed", 2, "float64"),
        ("two", "twice", 5, "float64"),
        ("two", "anomaly", 1, "float64"),
        ("two", "empty_batch", 4, "float64"),
        ("two", "stream", 2, "float64"),
        ("two", "packs", 4, "float64"),
        ("two", "compiled", 2, "float32"),
        ("two", "sequences", 4, "float64"),
        ("three", "sequences", 4, "float64"),
        ("four", "beside", 2, "float64"),
    ],
)
def test_what_processes_do_is_what_one_does(session, job, count, dtype, tmp_path):
    for errors in results(session, job, tmp_path):
        assert len(errors) == count
        for label, kinds in errors.items():
            assert max(kinds.values()) <= BOUNDS[dtype], (label, kinds)


@slow
def test_too_little_memory_is_reported_as_such(tmp_path):
    for each in results("two", "out_of_memory", tmp_path):
        assert each == {"error": "OutOfMemoryError"}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="expected two GPUs")
def test_the_kernels_of_two_gpus(tmp_path):
    for jobs in run(WORKER, tmp_path / "ranks", 2, "on_gpus"):
        assert len(jobs["on_gpus"]) == 13
        for label, kinds in jobs["on_gpus"].items():
            # atomic sums, and cuDNN's choice of algorithms, differ from call to call
            assert max(kinds.values()) <= 1e-4, (label, kinds)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="expected a GPU")
def test_steps_with_their_exchanges_from_a_cuda_graph(tmp_path):
    for jobs in run(WORKER, tmp_path / "ranks", min(2, torch.cuda.device_count()), "replayed"):
        for label, kinds in jobs["replayed"].items():
            assert max(kinds.values()) <= 1e-4, (label, kinds)


@pytest.mark.parametrize("rows, slabs, ms", [(32, 2, 6.0), (32, 4, 7.7), (128, 4, 13.5)])
def test_what_an_exchange_takes_by_the_model_of_costs(rows, slabs, ms):
    """Two and four GPUs took 5.9 and 7.1 ms more than their share, four of larger grids 14.6."""
    costs = shard_model.step(shard_model.Network(), (rows, 64, 64), slabs, batch=4)
    assert round(1e3 * costs["exchange"], 1) == ms


@slow
def test_processes_send_what_the_model_of_costs_says(tmp_path):
    for dtype, element in (("float32", 4), ("bfloat16", 2)):
        net = shard_model.Network(dim=64, depth=3, element=element)
        costs = shard_model.sent(net, (12, 5, 4), 2, batch=2)
        expected = sum(costs[name] for name in ("attention", "local mixing", "MD-TPE"))
        rest = 16 * 8 + 2 * 2 * 64 * 4  # shapes; the sums of the mean over tokens, both ways
        for each in results("two", "counted", tmp_path):
            assert each[dtype] == expected + rest
            # States are exchanged while planes of local mixing are under way
            assert each[f"{dtype}, under way"] == [2, 2]


@slow
def test_slabs_round_as_the_whole_does_under_autocast(tmp_path):
    for each in results("two", "autocast", tmp_path):
        assert min(each["whole"]) > 0
        for slabs, whole in zip(each["slabs"], each["whole"], strict=True):
            assert slabs <= 2 * whole  # the kernels' yardstick, see tests/kernels/yardstick.py


@slow
def test_processes_report_when_another_one_ended(tmp_path):
    survivors = results("killed", "killed", tmp_path)
    assert len(survivors) == 2
    for each in survivors:
        assert "shard_grid: process" in each["error"] and "it ended" in each["error"]
        assert each["seconds"] <= TIMEOUT + 5


@slow
def test_wrong_uses_are_refused_on_all_processes(tmp_path):
    expected = {
        "another size": "ValueError: shard_grid: slabs (batch, *space) of (1, 4, 8); (1, 4, 10)",
        "another batch": "ValueError: shard_grid: slabs (batch, *space) of (1, 4, 8); (2, 4, 8)",
        "named sizes": "ValueError: shard_grid: a slab of (4, 8) on process",
        "different inputs": "ValueError: shard_grid: slabs of tensors of (1, 1, 8, 8); (1",
        "different batches": "ValueError: shard_grid: slabs of tensors of (1, 1, 8, 8); (2",
        "not whole patches": "ValueError: slabs of (3, 3) along axis 0: expected multiples of 2",
        "no such axis": "ValueError: shard_grid: axis=2, expected an axis of 2, 0 to 1",
        "all dimensions": "ValueError: shard_grid: a mesh of 2 dimensions",
        "no group": "TypeError: shard_grid: a group of type str",
        "another mixer": "ValueError: layout=Slab((2, 4), axis=0, sizes=(2, 2)) within shard_grid or predict_large",
        "a stem": "ValueError: shard_grid and predict_large: expected none with stem_blocks",
        "a diffusion": "ValueError: NDLightDiT within shard_grid: expected an NDLightNet",
        "points": "ValueError: a pack of points within shard_grid: expected an NDLightNet",
        "no tokens": "ValueError: shard_grid: slabs (batch, *space) of (1, 0, 8); (1, 4, 8)",
        "no tokens of a sample": "ValueError: shard_grid: slabs of samples [[(0, 4), (2, 4)]]",
        "one dimension": "(1, 5)",
    }
    for messages in results("two", "refused", tmp_path):
        assert messages.pop("a layer") <= BOUNDS["float32"]
        assert messages.keys() == expected.keys()
        for name, text in expected.items():
            assert messages[name].startswith(text), (name, messages[name])
