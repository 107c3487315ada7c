"""The command `family`: a short training on each kind of data, its batches, rows and options."""

import json

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn

import family
from ndlightnet_evidence import photographs
from ndlightnet_evidence.load import load

FOLDERS = {"size": 8, "padding": 1, "hflip": 0.5, "random_erasing": 0.2, "cutmix": 1.0, "mixup": 0.2}


def volumes(folder):
    """48 volumes of 4 x 4 x 4, bright in one half or in the other."""
    rng, labels = np.random.default_rng(0), np.arange(48)[:, None] % 2
    images = rng.integers(0, 60, (48, 4, 4, 4), dtype=np.uint8)
    images[labels[:, 0] == 1, :2] += 150
    splits = {"train": slice(0, 32), "val": slice(32, 36), "test": slice(36, 48)}
    arrays = {f"{n}_{k}": v[s] for n, s in splits.items() for k, v in (("images", images), ("labels", labels))}
    np.savez(folder / "set.npz", **arrays)
    return {"root": str(folder / "set.npz"), "batch_size": 8}


def photos(folder):
    """Pictures of 8 x 8, dark or light, 24 to train with, 8 of them held out, 8 to test."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for name, light in (("dark", 40), ("light", 160)):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(light, light + 50, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return {"root": str(folder), "batch_size": 8, "crop_pct": 1.0, "validation": 0.34, **FOLDERS}


def text(folder):
    (folder / "text").write_bytes(b"to be or not to be, " * 400)
    windows = {"length": 16, "windows": 10, "lengths": [32, 64], "test_bytes": 256, "fractions": [0.9, 0.0, 0.1]}
    return {"root": str(folder / "text"), "batch_size": 4, **windows}


KINDS = {
    "ImageData": (volumes, 8, {"dims": 3, "in_chans": 1, "num_classes": 2, "patch_size": 2}, 3e-3),
    "ImageFolders": (photos, 8, {"dims": 2, "num_classes": 2, "patch_size": 4}, 1e-2),
    "TextData": (text, 30, {"dims": 1, "vocab_size": 256, "causal": True}, 3e-2),
}


@pytest.fixture
def config(tmp_path, request):
    make, epochs, net, lr = KINDS[getattr(request, "param", "ImageData")]
    (tmp_path / "data").mkdir()
    init_args = {**net, "embed_dim": 16, "depth": 1}
    average = {"class_path": "ndlightnet.training.AveragedWeights"}
    content = {
        "trainer": {"max_epochs": epochs, "gradient_clip_val": 1.0, "callbacks": [average] if make is photos else []},
        "model": {
            "lr": lr,
            "weight_decay": 0.05,
            "net": {"class_path": "ndlightnet.NDLightNet", "init_args": init_args},
        },
        "data": {
            "class_path": f"ndlightnet.training.{getattr(request, 'param', 'ImageData')}",
            "init_args": make(tmp_path / "data"),
        },
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "tiny.yaml"


def results(out):
    return {(run["row"], run["seed"]): run for run in json.loads((out / "runs.json").read_text())}


@pytest.mark.slow
@pytest.mark.parametrize("config", KINDS, indirect=True)
def test_a_short_training_learns_and_its_batches_follow_from_the_seed(config, tmp_path):
    row = "LightNetAttention" if "TextData" in config.read_text() else "Identity"
    family.main([str(config), "--rows", row, "--seeds", "0", "--out", str(tmp_path / "out")])
    run = results(tmp_path / "out")[row, 0]
    data = load(family.read_config(config, []))
    assert run["steps"] == data.steps and run["step_ms"] > 0
    if "bits_16" in run:  # the longest windows hold the same bytes as the others
        assert run["bits_per_byte"] == run["bits_16"]
        assert all(run[f"bits_{n}"] < 2.7 for n in (16, 32, 64))  # 2.71 by the counts of the letters
        assert (tmp_path / "out" / "lengths.png").read_bytes().startswith(b"\x89PNG")
        bits = data.test(lambda x: torch.zeros(*x.shape, 256), False)
        assert all(value == pytest.approx(8) for value in bits.values())
        windows = torch.cat([batch for (batch,) in data.batches(0, 5)])
        starts = torch.stack([(data.text.unfold(0, 17, 1) == window).all(1) for window in windows])
        assert windows.shape == (20, 17) and starts.any(1).all()  # all are windows of the text
    else:
        assert run["top1"] > 0.9
    for one, same, changed in zip(*(data.batches(seed, 3) for seed in (3, 3, 4)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
        assert not torch.equal(one[0], changed[0])


@pytest.mark.slow
def test_runs_make_a_table_and_are_not_made_again_unless_they_failed(config, tmp_path, monkeypatch):
    out, plain_run, failing = tmp_path / "out", family.run, {("TNL axes", 1)}

    def run(o, study, who):
        started.append((who["row"], who["seed"]))
        if started[-1] in failing:
            raise RuntimeError("no memory left")
        return plain_run(o, study, who)

    monkeypatch.setattr(family, "run", run)
    rows = ["Identity", "TNL axes"]
    for expected in ([(row, seed) for seed in (0, 1) for row in rows], [("TNL axes", 1)], []):
        started = []
        family.main([str(config), "--rows", *rows, "--seeds", "0", "1", "--steps", "8", "--out", str(out)])
        assert started == expected
        text = (out / "table.md").read_text()
        assert ("Failed: TNL axes, seed 1 (RuntimeError: no memory left)." in text) == bool(failing)
        failing.clear()
    runs = results(out)
    assert set(runs) == {(row, seed) for row in rows for seed in (0, 1)}
    assert all(run["steps"] == 8 for run in runs.values())
    assert "step_ms" in runs["Identity", 0] and "step_ms" not in runs["Identity", 1]  # of the first run
    assert runs["Identity", 0]["latency_ms"] > 0 and runs["TNL axes", 0]["state_size"] == 16 * 16
    first, second = text.splitlines()[2:4]
    assert first.startswith("| Identity | 0.0") and " ± " in first and " 256 " in second
    assert (out / "family.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_rows_of_a_file_at_two_rates_and_changes_of_the_config(config, tmp_path):
    (tmp_path / "rows.yaml").write_text(".heads: &heads {heads: 2}\nnarrow: {embed_dim: 8}\nplain: {tpe: false}\n")
    arguments = ["--file", str(tmp_path / "rows.yaml"), "--rows", "narrow", "GLA axes", "--lr", "1e-3", "2e-3"]
    changes = ["--steps", "1", "--set", "data.init_args.batch_size=4"]
    family.main([str(config), *arguments, *changes, "--seeds", "4", "--out", str(tmp_path / "out")])
    runs = results(tmp_path / "out")
    assert [row for row, _ in runs] == [f"{row}, lr 0.00{n}" for row in ("narrow", "GLA axes") for n in (1, 2)]
    sizes = {row: run["parameters"] for (row, _), run in runs.items()}
    assert sizes["narrow, lr 0.001"] < sizes["GLA axes, lr 0.001"] / 1.5
    with pytest.raises(ValueError, match="row 'GLA spiral'"):
        family.main([str(config), "--rows", "GLA spiral", "--out", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ImageFolders"], indirect=True)
def test_rows_have_equal_time_and_a_curve(config, tmp_path):
    family.main([str(config), "--rows", "Identity", "--seeds", "0", "--seconds", "1", "--out", str(tmp_path / "out")])
    (run,) = results(tmp_path / "out").values()
    assert run["steps"] == int(1e3 / run["step_ms"])
    assert len(run["curve"]) == min(family.POINTS, run["steps"]) and run["curve"][-1][1] > 0.5
    assert run["curve"][-1][0] == pytest.approx(1, abs=2 * run["step_ms"] / 1e3)
    assert (tmp_path / "out" / "times.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("config", ["ImageFolders"], indirect=True)
def test_photographs_are_augmented_as_the_config_says_or_refused(config, capsys):
    """What is moved in is 0 before the normalisation, an erased box 0 after it."""

    def read(**changes):
        return load(family.read_config(config, [f"data.init_args.{k}={v}" for k, v in changes.items()]))

    for padding, erasing in ((2, 0), (1, 1)):
        data = read(mixup=0, cutmix=0, hflip=0, padding=padding, random_erasing=erasing)
        x, _ = next(data.batches(0, 1))
        moved_in, gone = (x == data.normalised(torch.zeros(3, 1, 1))).all(1), (x == 0).all(1)
        assert moved_in.any() and gone.flatten(1).any(1).all() == bool(erasing)
        assert padding == 1 or (moved_in[:, :2].any() and moved_in[:, -2:].any())
    data, labels = read(batch_size=999), torch.arange(16) % 2
    (x, mixed), *_ = data.batches(0, 2)
    assert data.steps == 8 and len(x) == 16 and torch.allclose(mixed.sum(1), torch.ones(16))
    likely = nn.functional.one_hot(labels, 2).float() * 60
    for smoothing in (0.0, 0.4):
        data = load(family.read_config(config, [f"model.label_smoothing={smoothing}"]))
        loss = data.loss(lambda _: likely, x, labels).item()
        assert loss == pytest.approx(smoothing / 2 * 60)  # the wrong class is so unlikely
    with pytest.raises(ValueError, match="data: scale: expected null, or padding above 0"):
        read(padding=0)
    with pytest.raises(SystemExit):
        family.main([str(config), "--set", "model.min_lr=1e-5"])
    assert "model.min_lr: expected null" in capsys.readouterr().err


def test_erased_boxes_are_zero_in_some_images():
    x = torch.ones(2000, 1, 16, 16)
    gone = (photographs.erased(x, 0.25, torch.Generator().manual_seed(0)) == 0).flatten(1).float().mean(1)
    assert 0.21 < (gone > 0).float().mean() < 0.29  # 4 standard deviations of 2,000 draws
    assert gone.max() < 0.5 and torch.equal(photographs.erased(x, 0.0, torch.Generator()), x)
