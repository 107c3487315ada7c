"""The family's table: rows, one step as Lightning's, files, runs that fail or are there."""

import json
from pathlib import Path

import family
import numpy as np
import pytest
import torch
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path):
    """48 volumes of 4 x 4 x 4: bright in one half or in the other."""
    rng = np.random.default_rng(0)
    labels = np.arange(48)[:, None] % 2
    images = rng.integers(0, 60, (48, 4, 4, 4), dtype=np.uint8)
    images[labels[:, 0] == 1, :2] += 150
    parts = {"train": slice(0, 32), "val": slice(32, 36), "test": slice(36, 48)}
    arrays = {f"{n}_{k}": v[s] for n, s in parts.items()
              for k, v in (("images", images), ("labels", labels))}  # fmt: skip
    np.savez(tmp_path / "set.npz", **arrays)
    net = {"dims": 3, "in_chans": 1, "num_classes": 2, "patch_size": 2, "embed_dim": 16, "depth": 1}
    content = {
        "trainer": {"max_epochs": 12, "gradient_clip_val": 1.0},
        "model": {"lr": 3e-3, "weight_decay": 0.05, "net": {"init_args": net}},
        "data": {"init_args": {"root": str(tmp_path / "set.npz"), "batch_size": 8}},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "tiny.yaml"


def test_rows_are_mixers_with_their_scans():
    assert family.factory("GLA axes")(16).scan == "axes"
    assert type(family.factory("SoftmaxAttention")(16)).__name__ == "SoftmaxAttention"
    for row in ("GLA spiral", "SoftmaxAttention both", "Gla"):
        with pytest.raises(ValueError, match=r"row '"):
            family.factory(row)


def test_runs_make_a_table_and_are_not_made_again(config, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    arguments = [str(config), "--rows", "LightNetAttention", "TNL axes", "--seeds", "0", "1",
                 "--out", str(out)]  # fmt: skip
    family.main(arguments)
    found = [json.loads(file.read_text()) for file in (out / "runs").glob("*.json")]
    runs = {(run["row"], run["seed"]): run for run in found}
    assert set(runs) == {
        (row, seed) for row in ("LightNetAttention", "TNL axes") for seed in (0, 1)
    }
    for run in runs.values():
        assert run["steps"] == 12 * 4 and run["step_ms"] > 0 and run["latency_ms"] > 0
        assert run["top1"] > 0.9  # half of them are of each class
    assert runs["TNL axes", 0]["state_size"] == 16 * 16
    table = (out / "table.md").read_text()
    assert table.splitlines()[2].startswith("| LightNetAttention | 0.0")
    assert table.splitlines()[3].startswith("| TNL axes | 0.0") and " ± " in table
    assert (out / "family.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "runs.csv").read_text().splitlines()) == 5
    capsys.readouterr()
    monkeypatch.setattr(family, "run", lambda *_: pytest.fail("made again"))
    family.main(arguments)
    assert (out / "table.md").read_text() == table


def test_a_row_that_fails_is_said_and_the_others_run(config, tmp_path, monkeypatch):
    whole = family.run

    def broken(row, *more):
        if row == "Identity":
            raise RuntimeError("no memory left")
        return whole(row, *more)

    monkeypatch.setattr(family, "run", broken)
    out = tmp_path / "out"
    family.main([str(config), "--rows", "Identity", "TNL raster", "S4 raster", "--seeds", "0",
                 "--epochs", "1", "--out", str(out)])  # fmt: skip
    lines = (out / "table.md").read_text().splitlines()
    assert lines[2] == "| Identity | RuntimeError: no memory left |"
    assert lines[3].startswith("| TNL raster | 0.0") and lines[4].startswith("| S4 raster | 0.0")
    made = []
    monkeypatch.setattr(family, "run", lambda row, *more: made.append(row) or whole(row, *more))
    family.main([str(config), "--rows", "Identity", "TNL raster", "S4 raster", "--seeds", "0",
                 "--epochs", "1", "--out", str(out)])  # fmt: skip
    assert made == ["Identity"]  # what has failed alone
    assert (out / "table.md").read_text().splitlines()[2].startswith("| Identity | 0.0")


def test_parts_are_all_runs_once(config, tmp_path, monkeypatch):
    made = []

    def run(row, seed, *_):
        made.append((row, seed))
        raise RuntimeError("enough")

    monkeypatch.setattr(family, "run", run)
    for part in ("0", "1"):
        family.main([str(config), "--rows", "Identity", "LAVO", "TNL axes", "--seeds", "0", "1",
                     "--part", part, "2", "--out", str(tmp_path / part)])  # fmt: skip
    assert sorted(made) == sorted((row, seed) for row in ("Identity", "LAVO", "TNL axes")
                                  for seed in (0, 1))  # fmt: skip
    assert made[0] == ("Identity", 0) and made[3] == ("LAVO", 0)


def test_no_run_starts_when_the_time_is_up(config, tmp_path):
    out = tmp_path / "out"
    family.main([str(config), "--rows", "Identity", "--seeds", "0", "--minutes", "-1",
                 "--out", str(out)])  # fmt: skip
    assert (out / "table.md").read_text().splitlines()[2] == "| Identity | not run |"


def test_batches_are_the_same_for_every_row(config, monkeypatch):
    """Whatever a network draws while it is made."""
    content = yaml.safe_load(config.read_text())
    data = family.ImageData(**content["data"]["init_args"])
    data.setup("fit")
    seen = []
    plain = data.on_after_batch_transfer
    monkeypatch.setattr(
        data, "on_after_batch_transfer", lambda *a: seen.append(plain(*a)) or seen[-1]
    )
    content["trainer"]["max_epochs"] = 1
    for row in ("Identity", "Mamba both"):
        family.run(row, 3, content, data, "cpu")
    half = len(seen) // 2
    assert half == 4
    for one, other in zip(seen[:half], seen[half:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
