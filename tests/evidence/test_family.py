"""The command `family`: small comparisons of each kind of data, in turns, resumed, from files."""

import json

import numpy as np
import pytest
import torch
import yaml

import family
from ndlightnet_evidence import catalogue, sets, turns


@pytest.fixture
def config(tmp_path):
    """48 volumes of 4 x 4 x 4: bright in one half or in the other."""
    rng = np.random.default_rng(0)
    labels = np.arange(48)[:, None] % 2
    images = rng.integers(0, 60, (48, 4, 4, 4), dtype=np.uint8)
    images[labels[:, 0] == 1, :2] += 150
    parts = {"train": slice(0, 32), "val": slice(32, 36), "test": slice(36, 48)}
    arrays = {f"{n}_{k}": v[s] for n, s in parts.items() for k, v in (("images", images), ("labels", labels))}
    np.savez(tmp_path / "set.npz", **arrays)
    args = {"dims": 3, "in_chans": 1, "num_classes": 2, "patch_size": 2, "embed_dim": 16, "depth": 1}
    net = {"class_path": "ndlightnet.NDLightNet", "init_args": args}
    content = {
        "trainer": {"max_epochs": 8, "gradient_clip_val": 1.0},
        "model": {"lr": 3e-3, "weight_decay": 0.05, "net": net},
        "data": {
            "class_path": "ndlightnet.training.ImageData",
            "init_args": {"root": str(tmp_path / "set.npz"), "batch_size": 8},
        },
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "tiny.yaml"


def results(out):
    return {(run["row"], run["seed"]): run for run in json.loads((out / "runs.json").read_text())}


def test_runs_make_a_table_and_are_not_made_again(config, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    arguments = [str(config), "--rows", "Identity", "TNL axes", "--seeds", "0", "1", "--out", str(out)]
    family.main(arguments)
    runs = results(out)
    assert set(runs) == {(row, seed) for row in ("Identity", "TNL axes") for seed in (0, 1)}
    for (_, seed), run in runs.items():
        assert run["steps"] == 8 * 4 and run["top1"] > 0.9  # half of them are of each class
        assert ("step_ms" in run) == (seed == 0)
    assert runs["Identity", 0]["step_ms"] > 0 and runs["Identity", 0]["latency_ms"] > 0
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

    def run(plan, who):
        made.append(who["row"])
        yield turns.AHEAD
        if who["row"] in broken:
            raise RuntimeError("no memory left")
        return {"auc": 0.5, "step_ms": 1.0, "parameters": 10}

    monkeypatch.setattr(family, "run", run)
    arguments = [str(config), "--rows", "Identity", "TNL raster", "--seeds", "0", "--out", str(tmp_path / "out")]
    family.main(arguments)
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.splitlines()[2].startswith("| Identity   | failed")
    assert "Failed: Identity, seed 0 (RuntimeError: no memory left)." in table
    broken.clear()
    family.main(arguments)
    assert made == ["Identity", "TNL raster", "Identity"]  # what has failed alone


ROWS = """
.heads: &heads {heads: 2}
narrow: {embed_dim: 8}
no code: {tpe: false, mixer: ndlightnet.nn.mixers.Identity}
two heads: {lr: 0.5, mixer: {class_path: TNL, init_args: *heads}}
"""


def test_rows_from_a_file(config, tmp_path):
    """Each at two rates; a mixer of the catalogue beside them; changes of the config."""
    (tmp_path / "rows.yaml").write_text(ROWS)
    family.main(
        [
            str(config),
            "--file",
            str(tmp_path / "rows.yaml"),
            "--seeds",
            "4",
            "--out",
            str(tmp_path / "out"),
            "--rows",
            "two heads",
            "narrow",
            "GLA axes",
            "--lr",
            "1e-3",
            "2e-3",
            "--steps",
            "3",
            "--set",
            "data.init_args.batch_size=4",
        ]
    )
    rows = ["two heads", "narrow", "GLA axes"]
    runs = results(tmp_path / "out")
    assert [row for row, _ in runs] == [f"{r}, lr 0.00{n}" for r in rows for n in (1, 2)]
    assert all(run["steps"] == 3 for run in runs.values())
    sizes = {row: run["parameters"] for (row, _), run in runs.items()}
    assert sizes["narrow, lr 0.001"] < sizes["GLA axes, lr 0.001"] / 1.5
    found = catalogue.changes(tmp_path / "rows.yaml", None)
    assert list(found) == ["narrow", "no code", "two heads"] and found["two heads"]["lr"] == 0.5
    net = {"class_path": "ndlightnet.NDLightNet", "init_args": {"dims": 2, "embed_dim": 16}}
    built = catalogue.network(net, found["two heads"])
    assert [block.mixer.heads for block in built.blocks] == [2] * len(built.blocks)
    assert catalogue.network(net, found["no code"]).tpe is None


@pytest.mark.parametrize("path", ["ndlightnet.nn.mixers.Nothing", "ndlightnet.nowhere.Nothing"])
def test_a_row_of_a_class_that_is_not_there(config, tmp_path, path):
    (tmp_path / "rows.yaml").write_text(f"odd: {{mixer: [{path}]}}")
    with pytest.raises(ValueError, match=f"{path}: no such class"):
        family.main([str(config), "--file", str(tmp_path / "rows.yaml")])


def test_a_row_that_is_none(config, tmp_path):
    with pytest.raises(ValueError, match="row 'GLA spiral'"):
        family.main([str(config), "--rows", "GLA spiral", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def plan_of(config, steps=4):
    content = family.read_config(config, [])
    rows = catalogue.changes(None, ["Identity", "Mamba both"])
    return family.Plan(content, rows, sets.load(content), steps)


def test_batches_are_the_same_for_every_row(config, monkeypatch):
    """Whatever a network draws while it is made; other seeds get others."""
    plan = plan_of(config)
    plan.measured |= {"Identity": {"step_ms": 1.0}, "Mamba both": {"step_ms": 1.0}}
    seen = []
    plain = plan.data.loss
    monkeypatch.setattr(plan.data, "loss", lambda net, *x: seen.append(x) or plain(net, *x))
    for row, seed in (("Identity", 3), ("Mamba both", 3), ("Identity", 4)):
        turns.finish(family.run(plan, {"row": row, "seed": seed}))
    assert len(seen) == 12
    for one, other, third in zip(seen[:4], seen[4:8], seen[8:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert not torch.equal(one[0], third[0])


@pytest.mark.parametrize("jobs", [2, 3])
def test_runs_in_turns_are_those_alone(config, tmp_path, jobs):
    """With drop path, which draws in every step."""
    given = [
        str(config),
        "--rows",
        "Identity",
        "TNL axes",
        "--seeds",
        "0",
        "1",
        "--set",
        "model.net.init_args.drop_path_rate=0.5",
        "model.net.init_args.depth=2",
        "--steps",
        "30",
    ]
    found = []
    for number in (1, jobs):
        family.main([*given, "--jobs", str(number), "--out", str(tmp_path / str(number))])
        found.append(results(tmp_path / str(number)))
    assert set(found[0]) == set(found[1])
    for who, run in found[0].items():
        assert run["recall"] == found[1][who]["recall"], who


def test_text(tmp_path):
    """The longest windows hold the same bytes as the others; a text that repeats is learnt."""
    (tmp_path / "text").write_bytes(b"to be or not to be, " * 400)
    args = {"dims": 1, "vocab_size": 256, "causal": True, "embed_dim": 16, "depth": 1}
    net = {"class_path": "ndlightnet.NDLightNet", "init_args": args}
    data = {
        "root": str(tmp_path / "text"),
        "fractions": [0.9, 0.0, 0.1],
        "length": 16,
        "windows": 10,
        "batch_size": 4,
        "lengths": [32, 64],
        "test_bytes": 256,
    }
    content = {
        "trainer": {"max_epochs": 30, "gradient_clip_val": 1.0},
        "model": {"lr": 3e-2, "weight_decay": 0.1, "net": net},
        "data": {"class_path": "ndlightnet.training.TextData", "init_args": data},
    }
    (tmp_path / "text.yaml").write_text(yaml.safe_dump(content))
    family.main(
        [str(tmp_path / "text.yaml"), "--rows", "LightNetAttention", "--seeds", "0", "--out", str(tmp_path / "out")]
    )
    (run,) = results(tmp_path / "out").values()
    assert run["steps"] == 30 * 2 and run["bits_per_byte"] == run["bits_16"]
    assert all(run[f"bits_{n}"] < 2.7 for n in (16, 32, 64))  # 2.71 by the counts of the letters
    assert " bits_64 " in (tmp_path / "out" / "table.md").read_text()
    assert (tmp_path / "out" / "lengths.png").read_bytes().startswith(b"\x89PNG")
    text = sets.load(content)
    parts = torch.cat([batch for (batch,) in text.batches(0, 5)])
    assert parts.shape == (20, 17)
    starts = torch.stack([(text.text.unfold(0, 17, 1) == part).all(1) for part in parts[:8]])
    assert starts.any(1).all()  # all are windows of the text
    with torch.no_grad():
        found = turns.finish(text.test(lambda x: torch.zeros(*x.shape, 256), False))
    assert all(bits == pytest.approx(8) for bits in found.values())


@pytest.fixture
def videos(tmp_path):
    """Videos of 12 frames: bright ones and dark ones."""
    av = pytest.importorskip("av")
    for split, count in (("train", 6), ("test", 2)):
        for label, level in (("bright", 200), ("dark", 30)):
            folder = tmp_path / "videos" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                with av.open(str(folder / f"{number}.mp4"), "w") as file:
                    stream = file.add_stream("mpeg4", rate=10)
                    stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
                    for _ in range(12):
                        picture = np.full((24, 32, 3), level, np.uint8)
                        file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
                    file.mux(stream.encode())
    return tmp_path / "videos"


def test_videos(videos, tmp_path):
    args = {"dims": 3, "num_classes": 2, "patch_size": [2, 8, 8], "embed_dim": 16, "depth": 1}
    net = {"class_path": "ndlightnet.NDLightNet", "init_args": args}
    data = {
        "root": str(videos),
        "frames": 4,
        "size": 16,
        "batch_size": 4,
        "repeats": 2,
        "workers": 0,
        "clips": 2,
        "validation": 0.0,
    }
    content = {
        "trainer": {"max_epochs": 3, "gradient_clip_val": 1.0},
        "model": {"lr": 1e-2, "weight_decay": 0.05, "net": net},
        "data": {"class_path": "ndlightnet.training.VideoData", "init_args": data},
    }
    (tmp_path / "videos.yaml").write_text(yaml.safe_dump(content))
    family.main(
        [
            str(tmp_path / "videos.yaml"),
            "--rows",
            "Identity",
            "TNL raster",
            "--seeds",
            "0",
            "--jobs",
            "2",
            "--out",
            str(tmp_path / "out"),
        ]
    )
    for run in results(tmp_path / "out").values():
        assert run["steps"] == 3 * 6 and run["top1"] == 1.0
    made = sets.load(content)
    one, same, other = (list(made.batches(seed, 2)) for seed in (0, 0, 1))
    assert one[0][0].shape == (4, 3, 4, 16, 16)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0][0], other[0][0])
