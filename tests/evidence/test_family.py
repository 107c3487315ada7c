"""The command `family`: a short training on each kind of data, its batches, rows and options."""

import json

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn

import family
from ndlightnet_evidence import sets


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
    changes = {"size": 8, "padding": 1, "hflip": 0.5, "random_erasing": 0.2, "cutmix": 1.0, "mixup": 0.2}
    return {"root": str(folder), "batch_size": 8, "workers": 0, "crop_pct": 1.0, "validation": 0.34, **changes}


def text(folder):
    (folder / "text").write_bytes(b"to be or not to be, " * 400)
    windows = {"length": 16, "windows": 10, "lengths": [32, 64], "test_tokens": 256, "fractions": [0.9, 0.0, 0.1]}
    return {"root": str(folder / "text"), "batch_size": 4, "workers": 0, **windows}


KINDS = {
    "ImageData": (volumes, 8, {"dims": 3, "in_chans": 1, "num_classes": 2, "patch_size": 2}, 3e-3),
    "ImageFolders": (photos, 8, {"dims": 2, "num_classes": 2, "patch_size": 4}, 1e-2),
    "TextData": (text, 30, {"dims": 1, "vocab_size": 256, "causal": True}, 3e-2),
}


@pytest.fixture
def config(tmp_path, request):
    kind = getattr(request, "param", "ImageData")
    make, epochs, net, lr = KINDS[kind]
    (tmp_path / "data").mkdir()
    average = [{"class_path": "ndlightnet.training.AveragedWeights"}] if make is photos else []
    network = {"class_path": "ndlightnet.NDLightNet", "init_args": {**net, "embed_dim": 16, "depth": 1}}
    return {
        "trainer": {"max_epochs": epochs, "gradient_clip_val": 1.0, "callbacks": average},
        "model": {"lr": lr, "weight_decay": 0.05, "net": network},
        "data": {"class_path": f"ndlightnet.training.{kind}", "init_args": make(tmp_path / "data")},
    }


@pytest.fixture
def run(config, tmp_path):
    """run(arguments) -> the runs of the command by row and seed."""

    def run(*arguments: str):
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
        family.main([str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "out"), *arguments])
        return {(run["row"], run["seed"]): run for run in json.loads((tmp_path / "out" / "runs.json").read_text())}

    return run


@pytest.mark.slow
@pytest.mark.parametrize("config", KINDS, indirect=True)
def test_a_short_training_learns_and_its_batches_follow_from_the_seed(config, run, tmp_path):
    row = "LightNetAttention" if "TextData" in config["data"]["class_path"] else "Identity"
    result, data = run("--rows", row, "--seeds", "0")[row, 0], sets.load(config)
    assert result["steps"] == data.steps and result["step_ms"] > 0
    if "bits_16" in result:  # the longest windows hold the same bytes as the others
        assert result["bits_per_byte"] == result["bits_16"]
        assert all(result[f"bits_{n}"] < 2.7 for n in (16, 32, 64))  # 2.71 by the counts of the letters
        assert (tmp_path / "out" / "lengths.png").read_bytes().startswith(b"\x89PNG")
        bits = data.test(lambda x: torch.zeros(*x.shape, 256))
        assert all(value == pytest.approx(8) for value in bits.values())
        windows = torch.cat([batch for (batch,) in data.batches(0, 5)])
        starts = torch.stack([(data.data.splits[0][:].unfold(0, 17, 1) == window).all(1) for window in windows])
        assert windows.shape == (20, 17) and starts.any(1).all()  # all are windows of the text
    else:
        assert result["top1"] > 0.9
    for one, same, changed in zip(*(data.batches(seed, 3) for seed in (3, 3, 4)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
        assert not torch.equal(one[0], changed[0])
    epoch = len(data.data.train_dataloader())
    first, *_, again = data.batches(3, 1 + epoch)
    assert data.steps % epoch == 0 and not torch.equal(first[0], again[0])  # an epoch has an order of its own


@pytest.mark.slow
def test_runs_make_a_table_and_are_not_made_again_unless_they_failed(run, tmp_path, monkeypatch):
    train = family.Study.run

    def one(study, spec):
        started.append((spec["row"], spec["seed"]))
        if started[-1] in failing:
            raise RuntimeError("no memory left")
        return train(study, spec)

    monkeypatch.setattr(family.Study, "run", one)
    (tmp_path / "rows.yaml").write_text(".heads: &heads {heads: 2}\nnarrow: {embed_dim: 8}\nplain: {tpe: false}\n")
    rows = [f"{row}, lr 0.00{n}" for row in ("narrow", "TNL axes") for n in (1, 2)]
    failing = {(rows[3], 1)}
    for expected in ([(row, seed) for seed in (0, 1) for row in rows], [(rows[3], 1)], []):
        started = []
        options = ["--lr", "1e-3", "2e-3", "--seeds", "0", "1", "--steps", "8"]
        runs = run("--file", f"{tmp_path}/rows.yaml", "--rows", "narrow", "TNL axes", *options)
        assert started == expected
        table = (tmp_path / "out" / "table.md").read_text()
        assert (f"Failed: {rows[3]}, seed 1 (RuntimeError: no memory left)." in table) == bool(failing)
        failing.clear()
    assert set(runs) == {(row, seed) for row in rows for seed in (0, 1)}
    assert all(result["steps"] == 8 for result in runs.values())
    assert "step_ms" in runs[rows[0], 0] and "step_ms" not in runs[rows[0], 1]  # of the first run
    assert runs[rows[0], 0]["parameters"] < runs[rows[2], 0]["parameters"] / 1.5
    line = table.splitlines()[4]
    assert line.startswith("| TNL axes, lr 0.001 | 0.0") and " ± " in line
    assert (tmp_path / "out" / "family.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ImageFolders"], indirect=True)
def test_rows_have_equal_time_and_a_curve(run, tmp_path):
    (result,) = run("--rows", "Identity", "--seeds", "0", "--seconds", "1").values()
    assert result["steps"] == int(1e3 / result["step_ms"])
    assert len(result["curve"]) == min(family.POINTS, result["steps"]) and result["curve"][-1][1] > 0.5
    assert result["curve"][-1][0] == pytest.approx(1, abs=2 * result["step_ms"] / 1e3)
    assert (tmp_path / "out" / "times.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_arguments_end_in_a_line(config, run, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("--rows", "GLA spiral")
    config["model"]["min_lr"] = 1e-5
    with pytest.raises(SystemExit):
        run()
    err = capsys.readouterr().err
    assert "row 'GLA spiral'" in err and "model.min_lr: expected null" in err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "held_out", "tested"), [("ImageData", 4, 12), ("ImageFolders", 8, 8)], indirect=["config"]
)
def test_images_are_split_as_by_the_tasks_and_labels_are_smoothed(config, held_out, tested, monkeypatch):
    data = sets.load(config)
    assert data.measures == ("auc", "top1") and data.steps == 8 * (32 // 8 if held_out == 4 else 16 // 8)
    assert {name: len(labels) for name, (_, labels) in data.splits.items()} == {"validation": held_out, "test": tested}
    ((x, labels),) = data.batches(0, 1)
    assert x.dtype == torch.float32 and x.shape == (8, *data.splits["test"][0].shape[1:])
    if held_out == 8:  # photographs, augmented as in their task: classes are mixed
        assert labels.shape == (8, 2) and torch.allclose(labels.sum(1), torch.ones(8))
    likely = nn.functional.one_hot(torch.arange(8) % 2, 2).float() * 60
    for smoothing in (0.0, 0.4):
        config["model"]["label_smoothing"] = smoothing
        loss = sets.load(config).loss(lambda _: likely, x, torch.arange(8) % 2).item()
        assert loss == pytest.approx(smoothing / 2 * 60)  # the wrong class is so unlikely
    monkeypatch.setattr(data, "test", lambda net, split="test": split)
    assert data.validate(nn.Identity()) == "validation"
