"""The command `family`: one small comparison, rows that fail or are there already."""

import json
from argparse import Namespace

import numpy as np
import pytest
import torch
import yaml

import family


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
        "trainer": {"max_epochs": 8, "gradient_clip_val": 1.0},
        "model": {"lr": 3e-3, "weight_decay": 0.05, "net": {"init_args": net}},
        "data": {"init_args": {"root": str(tmp_path / "set.npz"), "batch_size": 8}},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "tiny.yaml"


def test_runs_make_a_table_and_are_not_made_again(config, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    arguments = [str(config), "--rows", "Identity", "TNL axes", "--seeds", "0", "1",
                 "--out", str(out)]  # fmt: skip
    family.main(arguments)
    found = json.loads((out / "runs.json").read_text())
    runs = {(run["row"], run["seed"]): run for run in found}
    assert set(runs) == {(row, seed) for row in ("Identity", "TNL axes") for seed in (0, 1)}
    for run in runs.values():
        assert run["steps"] == 8 * 4 and run["step_ms"] > 0 and run["latency_ms"] > 0
        assert run["top1"] > 0.9  # half of them are of each class
    assert runs["TNL axes", 0]["state_size"] == 16 * 16
    table = (out / "table.md").read_text()
    first, second = table.splitlines()[2:4]
    assert first.startswith("| Identity | 0.0") and " ± " in first
    assert second.startswith("| TNL axes | 0.0") and " 256 " in second
    assert (out / "family.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "runs.csv").read_text().splitlines()) == 5
    monkeypatch.setattr(family, "run", lambda *_: pytest.fail("made again"))
    family.main(arguments)
    assert (out / "table.md").read_text() == table and table in capsys.readouterr().out


def test_a_row_that_fails_is_said_and_made_again(config, tmp_path, monkeypatch):
    made, broken = [], {"Identity"}

    def run(o, who):
        made.append(who["row"])
        if who["row"] in broken:
            raise RuntimeError("no memory left")
        return {"top1": 0.5, "step_ms": 1.0, "parameters": 10}

    monkeypatch.setattr(family, "run", run)
    arguments = [str(config), "--rows", "Identity", "TNL raster", "--seeds", "0", "--out",
                 str(tmp_path / "out")]  # fmt: skip
    family.main(arguments)
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.splitlines()[2].startswith("| Identity   | failed")
    assert "Failed: Identity, seed 0 (RuntimeError: no memory left)." in table
    broken.clear()
    family.main(arguments)
    assert made == ["Identity", "TNL raster", "Identity"]  # what has failed alone


def test_a_row_that_is_none(config, tmp_path):
    with pytest.raises(ValueError, match="row 'GLA spiral'"):
        family.main([str(config), "--rows", "GLA spiral", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_batches_are_the_same_for_every_row(config, monkeypatch):
    """Whatever a network draws while it is made."""
    _, data = family.load(config, None, 1)
    seen = []
    plain = data.on_after_batch_transfer
    monkeypatch.setattr(
        data, "on_after_batch_transfer", lambda *a: seen.append(plain(*a)) or seen[-1]
    )
    for row in ("Identity", "Mamba both"):
        family.run(Namespace(config=config, root=None, epochs=1), {"row": row, "seed": 3})
    half = len(seen) // 2
    assert half == 4
    for one, other in zip(seen[:half], seen[half:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
