"""Runs in turns: who goes when, what a run draws, errors, and the end of the time."""

import pytest
import torch
from torch import nn

from ndlightnet_evidence import turns
from ndlightnet_evidence.graphs import Replay, Steps


def who(seed):
    return {"row": "A", "seed": seed}


def test_runs_take_turns():
    """Two at a time; the next one begins when one has ended."""
    seen, done = [], []

    def one(who):
        for step in range(2 + who["seed"]):
            seen.append((who["seed"], step))
            yield turns.AHEAD
        return {"top1": 0.1 * who["seed"]}

    turns.run_all([who(seed) for seed in range(3)], one, done.append, jobs=2, minutes=1)
    assert seen == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3)]
    assert [run["seed"] for run in done] == [0, 1, 2]
    assert done[2]["top1"] == 0.2 and done[2]["run_seconds"] > 0
    assert ("CPU" in done[2]["device"]) != torch.cuda.is_available()


def test_a_run_draws_what_it_draws_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()

    def one(who):
        torch.manual_seed(who["seed"])
        drawn = []
        for _ in range(5):
            drawn.append(float(torch.rand(())))
            yield turns.AHEAD
        return {"drawn": drawn}

    found = {jobs: [] for jobs in (1, 3)}
    for jobs, done in found.items():
        turns.run_all([who(seed) for seed in range(3)], one, done.append, jobs=jobs, minutes=1)
    drawn = [[run["drawn"] for run in done] for done in found.values()]
    assert drawn[0] == drawn[1] and len({tuple(one) for one in drawn[0]}) == 3
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_graphs_draw_and_compute_what_they_do_alone():
    """With dropout, and with products large enough that cuBLAS uses its workspace."""
    x = torch.randn(64, 4096, device="cuda")

    def one(who):
        torch.manual_seed(who["seed"])
        net = nn.Linear(4096, 256).to("cuda")
        steps = Steps(net, lambda x: nn.functional.dropout(net(x)).square().mean(), 0.0, 1.0)
        for _ in range(50):
            steps(0.01, x)
            yield turns.AHEAD
        out = Replay(lambda x: net(x).sum(), x.clone())(x)
        yield turns.DONE
        return {"sum": float(out), "weight": net.weight.flatten()[:9].tolist()}

    found = {jobs: [] for jobs in (1, 4)}
    for jobs, done in found.items():
        turns.run_all([who(seed) for seed in range(4)], one, done.append, jobs=jobs, minutes=1)
        done.sort(key=lambda run: run["seed"])
    for alone, together in zip(found[1], found[4], strict=True):
        assert alone["weight"] == together["weight"] and alone["sum"] == together["sum"]


def test_a_run_that_fails_ends_alone():
    def one(who):
        yield turns.AHEAD
        if who["seed"] == 0:
            raise ValueError("no")
        yield turns.AHEAD
        return {}

    done = []
    turns.run_all([who(seed) for seed in range(3)], one, done.append, jobs=2, minutes=1)
    assert [run.get("error") for run in done] == ["ValueError: no", None, None]


def test_no_run_begins_when_the_minutes_are_over():
    def one(who):
        yield turns.AHEAD
        return {}

    done = []
    turns.run_all([who(seed) for seed in range(3)], one, done.append, jobs=2, minutes=0)
    assert done == [{**who(seed), "missing": True} for seed in range(3)]
