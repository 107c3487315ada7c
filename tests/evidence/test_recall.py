"""The command `recall`: its streams, what it asks of a network, and one small run."""

import csv
import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import recall

ROOT = Path(__file__).parents[2]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_gaps_are_log_uniform_and_within_their_bounds():
    at = recall.event_frames(2000, 12, 64, rng())
    gaps = torch.cat([at[:, :1] + 1, at.diff()], 1)
    assert gaps.min() == 1 and gaps.max() == 64
    short = (gaps < 8).double().mean()  # of exp(u log 65): log 8 / log 65 = 0.498
    assert abs(short - 0.498) < 0.02


def test_labels_are_the_latest_event_found_in_the_cells():
    at = recall.event_frames(5, 6, 9, rng(1))
    cells, label, age = recall.streams(at, 30, rng(2))
    assert cells.shape == (5, recall.SYMBOLS + 1, 30) and label.shape == age.shape == (5, 30)
    seen = cells > recall.LOUD / 2  # noise has a standard deviation of 1
    for stream, row in enumerate(at.tolist()):
        latest, when = -1, -1
        for frame in range(30):
            assert bool(seen[stream, -1, frame]) == (frame in row)
            if frame in row:
                (latest,) = seen[stream, :-1, frame].nonzero().flatten().tolist()
                when = frame
            assert label[stream, frame] == latest and age[stream, frame] == frame - when


class Oracle(torch.nn.Module):
    """Right up to `reach` frames after an event, then wrong; counts the events before the last."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach, self.events, self.rows = reach, [], 0

    def get_classifier(self):
        return torch.nn.Identity()

    def forward_features(self, cells):
        loud = cells > 4
        self.events += loud[:, -1].sum(1).tolist()
        now = torch.arange(cells.shape[-1])
        last = torch.where(loud[:, -1], now, -1).cummax(1).values
        symbol = loud[:, :-1].int().argmax(1).gather(1, last.clamp(min=0))
        wrong = (now - last > self.reach).long()
        return torch.nn.functional.one_hot((symbol + wrong) % 8, 8).float()


@pytest.mark.parametrize("older", [0, 7])
def test_the_test_asks_exactly_k_frames_after_the_last_of_all_events(older):
    options = Namespace(gap=32, batch=2, frames=64, streams=21, k=[1, 2, 4, 8, 16, 32])
    for reach in (1, 7, 8, 32):
        net = Oracle(reach)
        right = recall.accuracy(net, older, rng(3), options)
        assert right == [float(k <= reach) for k in options.k]
        assert net.events == [older + 1] * 21


def test_what_the_most_frequent_symbol_tells():
    assert recall.most_frequent(0) == 1
    assert abs(recall.most_frequent(1) - (1 / 8 + 7 / 8 / 2)) < 0.005


def test_rates_of_heads():
    layer = recall.mixer("forget 0.5,0.25", 4)(16)
    assert layer.forget.tolist() == [0.5, 0.25, 0.5, 0.25]
    x = torch.randn(2, 9, 16)
    for rate in (0.5, 0.25):  # one rate for all heads: as many rates that are the same
        layer.forget.fill_(rate)
        other = recall.mixer(f"forget {rate}", 4)(16)
        other.load_state_dict(layer.state_dict(), strict=False)
        torch.testing.assert_close(layer(x, causal=True), other(x, causal=True))


def test_an_unknown_row_fails_before_anything_is_trained(tmp_path):
    with pytest.raises(KeyError, match="forgets"):
        recall.main(["--rows", "plain", "forgets 0.5", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_every_row_builds_its_mixer():
    kinds = {
        "plain": "LightNetAttention",
        "window 4": "LightNetAttention",
        "cosine": "LightNetAttention",
        "forget 0.2,0.02": "LightNetAttention",
        "softmax": "SoftmaxAttention",
        "rotary": "SoftmaxAttention",
        "identity": "Identity",
    }
    made = {row: recall.mixer(row, 4)(16) for row in kinds}
    assert {row: type(layer).__name__ for row, layer in made.items()} == kinds
    assert made["window 4"].window == 4 and made["cosine"].lrpe is not None is made["plain"].lrpe


def test_a_small_run(tmp_path, capsys):
    rows = ["plain", "identity"]
    small = "--gap 8 --frames 32 --batch 4 --steps 2 --streams 8 --dim 16 --heads 4 --older 0 3"
    recall.main([*small.split(), "--seeds", "5", "--rows", *rows, "--out", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out" / "runs.json").read_text())
    assert [(run["row"], run["seed"]) for run in found] == [(row, 5) for row in rows]
    panels = found[0]["curves"]
    assert list(panels) == ["the first event", "after 3 older events"]
    curve = panels["after 3 older events"]
    assert curve["x"] == [1, 2, 4, 8] and curve["chance"] == [0.125] * 4
    with open(tmp_path / "out" / "runs.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * 2 * 4 and (tmp_path / "out" / "recall.png").stat().st_size > 10_000
    assert [float(line["accuracy"]) for line in lines[4:8]] == curve["accuracy"]
    table = (tmp_path / "out" / "table.md").read_text()
    assert "### after 3 older events: accuracy by frames since the last event" in table
    assert table in capsys.readouterr().out
