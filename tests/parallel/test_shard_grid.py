"""Several processes that share a grid see what one process with the whole sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ndlightnet_evidence import shard_model
from tests.processes import run, run_once

from .sharded_networks import CASES
from .worker import TIMEOUT

WORKER = "tests.parallel.worker"
COUNTS = (2, 3)
BOUNDS = {"float32": 1e-5, "float64": 1e-10}


def found(count: int, job: str, tmp_path: Path) -> list[dict[str, Any]]:
    """Return what each of so many processes found in a job; they do all jobs once in a session."""
    return [jobs[job] for jobs in run_once(WORKER, tmp_path, count, "session")]


def check(processes: list[dict[str, Any]], count: int, dtype: str) -> None:
    """Check the errors of so many cases, of each process."""
    for errors in processes:
        assert len(errors) == count
        for label, kinds in errors.items():
            assert max(kinds.values()) <= BOUNDS[dtype], (label, kinds)


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_the_whole(name, count, tmp_path):
    for errors in found(count, "all_cases", tmp_path):
        own = {label: kinds for label, kinds in errors.items() if label.startswith(f"{name}, axis")}
        assert len(own) == (len(CASES[name].axes) + 1 if count == 2 else 1)
        for label, kinds in own.items():
            inputs = set() if CASES[name].words else {"input"}
            assert kinds.keys() == {"output", "parameters"} | inputs
            assert max(kinds.values()) <= BOUNDS[label.rpartition(" ")[2]], (label, kinds)


@pytest.mark.slow
def test_blocks_that_are_computed_again_meet_again(tmp_path):
    check(found(2, "recomputed", tmp_path), 2, "float64")


@pytest.mark.slow
def test_second_derivatives(tmp_path):
    check(found(2, "twice", tmp_path), 5, "float64")


@pytest.mark.slow
@pytest.mark.parametrize("job, count", [("anomaly", 1), ("empty_batch", 4)])
def test_rare_uses(job, count, tmp_path):
    check(found(2, job, tmp_path), count, "float64")


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_inputs_of_random_sizes_in_one_context(count, tmp_path):
    for errors in found(count, "sequences", tmp_path):
        assert len(errors) == 4
        for kind, each in errors.items():
            assert each["count"] >= 5 and each["output"] <= BOUNDS["float64"], (kind, each)


@pytest.mark.slow
def test_too_little_memory_is_told_as_such(tmp_path):
    for each in found(2, "out_of_memory", tmp_path):
        assert each == {"error": "OutOfMemoryError"}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="expected two GPUs")
def test_the_kernels_of_two_gpus(tmp_path):
    for errors in run(WORKER, tmp_path / "ranks", 2, "on_gpus"):
        assert len(errors) == 9
        for label, kinds in errors.items():
            # atomic sums, and cuDNN's choice of algorithms, differ from call to call
            assert max(kinds.values()) <= 1e-4, (label, kinds)


@pytest.mark.slow
def test_a_stream_of_split_frames(tmp_path):
    for errors in found(2, "stream", tmp_path):
        assert set(errors) == {"axis 1", "axis 2"}
        assert max(errors.values()) <= BOUNDS["float64"], errors


@pytest.mark.slow
def test_packs_of_slabs(tmp_path):
    check(found(2, "packs", tmp_path), 4, "float64")


@pytest.mark.slow
def test_ddp_and_fsdp2_beside_the_grid(tmp_path):
    for errors in found(4, "beside", tmp_path):
        assert errors.keys() == {"ddp", "fsdp2"}
        assert max(errors.values()) <= BOUNDS["float64"], errors


@pytest.mark.slow
def test_compiled_networks_are_one_graph(tmp_path):
    check(found(2, "compiled", tmp_path), 2, "float32")


@pytest.mark.parametrize("rows, batch, ms", [(64, 4, 16.5), (32, 4, 10.7), (64, 1, 5.5)])
def test_what_an_exchange_takes_by_the_model_of_costs(rows, batch, ms):
    """As kernels/README.md says, beside what two GPUs took: 16.4, 10.1 and 5.5 ms."""
    net, machine = shard_model.Network(), shard_model.Machine(token=641e-9)
    found = shard_model.step(net, machine, (rows, 64, 64), 2, batch)
    assert round(1e3 * found["exchange"], 1) == ms


@pytest.mark.slow
def test_processes_send_what_the_model_of_costs_says(tmp_path):
    for dtype, element in (("float32", 4), ("bfloat16", 2)):
        net = shard_model.Network(dim=64, depth=3, element=element)
        told = shard_model.sent(net, (12, 5, 4), 2, batch=2)
        expected = sum(told[what] for what in ("attention", "local mixing", "MD-TPE"))
        rest = 16 * 8 + 2 * 2 * 64 * 4  # shapes; the sums of the mean over tokens, both ways
        for each in found(2, "counted", tmp_path):
            assert each[dtype] == expected + rest
            # States are exchanged while planes of local mixing are under way
            assert each[f"{dtype}, under way"] == [2, 2]


@pytest.mark.slow
def test_parts_round_as_the_whole_does_under_autocast(tmp_path):
    for each in found(2, "autocast", tmp_path):
        assert min(each["whole"]) > 0
        for parts, whole in zip(each["parts"], each["whole"], strict=True):
            assert parts <= 2 * whole  # the kernels' yardstick, see tests/kernels/yardstick.py


@pytest.mark.slow
def test_processes_tell_when_another_one_ended(tmp_path):
    survivors = run(WORKER, tmp_path / "ranks", 3, "killed", failures=1)
    assert len(survivors) == 2
    for each in survivors:
        assert "shard_grid: process" in each["error"] and "it ended" in each["error"]
        assert each["seconds"] <= TIMEOUT + 5


@pytest.mark.slow
def test_wrong_uses_are_refused_on_all_processes(tmp_path):
    expected = {
        "another size": "ValueError: shard_grid: slabs (batch, *space) of (1, 4, 8); (1, 4, 10)",
        "another batch": "ValueError: shard_grid: slabs (batch, *space) of (1, 4, 8); (2, 4, 8)",
        "named sizes": "ValueError: shard_grid: a slab of (4, 8) on process",
        "different wholes": "ValueError: shard_grid: slabs of tensors of (1, 1, 8, 8); (1",
        "different batches": "ValueError: shard_grid: slabs of tensors of (1, 1, 8, 8); (2",
        "not whole patches": "ValueError: slabs of (3, 3) along axis 0: expected multiples of 2",
        "no such axis": "ValueError: shard_grid: axis=2, expected an axis of 2, 0 to 1",
        "all dimensions": "ValueError: shard_grid: a mesh of 2 dimensions",
        "no group": "TypeError: shard_grid: a group of type str",
        "another mixer": "ValueError: layout=Slab((2, 4), axis=0, sizes=(2, 2)) within shard_grid or predict_large",
        "a stem": "ValueError: shard_grid and predict_large: expected none with stem_blocks",
        "a diffusion": "ValueError: NDLightDiT within shard_grid: expected an NDLightNet",
        "no tokens": "ValueError: shard_grid: slabs (batch, *space) of (1, 0, 8); (1, 4, 8)",
        "no tokens of a sample": "ValueError: shard_grid: slabs of samples [[(0, 4), (2, 4)]]",
        "one dimension": "(1, 5)",
    }
    for told in found(2, "refused", tmp_path):
        assert told.pop("a layer") <= BOUNDS["float32"]
        assert told.keys() == expected.keys()
        for name, text in expected.items():
            assert told[name].startswith(text), (name, told[name])
