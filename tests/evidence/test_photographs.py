"""The command `family` on class folders of images: equal time for every row, accuracy over time."""

import json

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn

import family
from ndlightnet_evidence import photographs, sets
from ndlightnet_evidence.graphs import Steps


@pytest.fixture
def config(tmp_path):
    """Pictures of 8 x 8, dark or light, 24 to train with, 8 of them held out, 8 to test."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 4)):
        for name, light in (("dark", 40), ("light", 160)):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(light, light + 50, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    network = {"dims": 2, "num_classes": 2, "patch_size": 4, "embed_dim": 16, "depth": 1}
    content = {
        "trainer": {
            "max_epochs": 8,
            "gradient_clip_val": 1.0,
            "callbacks": [{"class_path": "ndlightnet.training.AveragedWeights"}],
        },
        "model": {
            "lr": 1e-2,
            "weight_decay": 0.05,
            "net": {"class_path": "ndlightnet.NDLightNet", "init_args": network},
        },
        "data": {
            "class_path": "ndlightnet.training.ImageFolders",
            "init_args": {
                "root": str(tmp_path),
                "size": 8,
                "batch_size": 8,
                "padding": 1,
                "hflip": 0.5,
                "random_erasing": 0.2,
                "cutmix": 1.0,
                "mixup": 0.2,
                "crop_pct": 1.0,
                "validation": 0.34,
            },
        },
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "tiny.yaml"


ROWS = """
ours: {}
another:
  net:
    class_path: ndlightnet_evidence.convolutions.Stemmed
    init_args: {num_classes: 2, patch_size: 2, embed_dim: 16, depth: 1, mixer: Identity}
"""


def test_rows_have_equal_time_and_a_curve(config, tmp_path):
    (tmp_path / "rows.yaml").write_text(ROWS)
    out = tmp_path / "out"
    family.main(
        [str(config), "--file", str(tmp_path / "rows.yaml"), "--seeds", "0", "--seconds", "1", "--out", str(out)]
    )
    runs = {run["row"]: run for run in json.loads((out / "runs.json").read_text())}
    assert set(runs) == {"ours", "another"}
    for run in runs.values():
        assert run["steps"] == int(1e3 / run["step_ms"])
        assert len(run["curve"]) == min(family.POINTS, run["steps"])
        assert run["curve"][-1][0] == pytest.approx(1, abs=2 * run["step_ms"] / 1e3)
        assert run["top1"] == 1 and run["curve"][-1][1] == 1
    assert (out / "times.png").read_bytes().startswith(b"\x89PNG")


def test_batches_follow_from_the_seed(config):
    data = sets.load(family.read_config(config, []))
    batches = [list(data.batches(seed, 5)) for seed in (3, 3, 4)]
    for (x, y), (again, same), (other, _) in zip(*batches, strict=True):
        assert x.shape == (8, 3, 8, 8) and y.shape == (8, 2)
        assert torch.equal(x, again) and torch.equal(y, same) and not torch.equal(x, other)
        assert torch.allclose(y.sum(1), torch.ones(8))


def test_batches_are_moved_and_erased(config):
    """What is moved in is 0 before the normalisation, an erased box 0 after it."""
    plain = ["data.init_args.mixup=0", "data.init_args.cutmix=0", "data.init_args.hflip=0"]
    for padding, erasing in ((2, 0), (1, 1)):
        more = [f"data.init_args.padding={padding}", f"data.init_args.random_erasing={erasing}"]
        data = sets.load(family.read_config(config, [*plain, *more]))
        x, _ = next(data.batches(0, 1))
        moved_in, gone = (x == data.normalised(torch.zeros(3, 1, 1))).all(1), (x == 0).all(1)
        assert moved_in.any() and gone.flatten(1).any(1).all() == bool(erasing)
        assert padding == 1 or (moved_in[:, :2].any() and moved_in[:, -2:].any())


def test_what_a_config_says_is_done_or_refused(config, capsys):
    """Not left out without a word."""
    data = sets.load(family.read_config(config, ["data.init_args.batch_size=999"]))
    assert data.steps == 8 and [len(x) for x, _ in data.batches(0, 2)] == [16, 16]
    (x, _), labels = next(data.batches(0, 1)), torch.arange(16) % 2
    for smoothing in (0.0, 0.4):
        data = sets.load(family.read_config(config, [f"model.label_smoothing={smoothing}"]))
        likely = nn.functional.one_hot(labels, 2).float() * 60
        far = smoothing / 2 * 60  # the wrong class is so unlikely
        assert data.loss(lambda _, likely=likely: likely, x, labels).item() == pytest.approx(far)
    with pytest.raises(ValueError, match="data: scale: expected null, or padding above 0"):
        sets.load(family.read_config(config, ["data.init_args.padding=0"]))
    with pytest.raises(SystemExit):
        family.main([str(config), "--set", "model.min_lr=1e-5"])
    assert "model.min_lr: expected null" in capsys.readouterr().err


def test_erased_boxes_are_zero_in_some_images():
    x = torch.ones(2000, 1, 16, 16)
    found = photographs.erased(x, 0.25, torch.Generator().manual_seed(0))
    gone = (found == 0).flatten(1).float().mean(1)
    assert 0.21 < (gone > 0).float().mean() < 0.29  # 4 standard deviations of 2,000 draws
    assert gone.max() < 0.5 and torch.equal(photographs.erased(x, 0.0, torch.Generator()), x)


def test_the_average_follows_the_weights():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    decays = (0.1, 0.2, 0.5, 0.4)
    steps = Steps(net, lambda x: net(x).square().sum(), 0.0, 1.0, decays.__getitem__)
    expected = {k: v.clone().double() for k, v in net.state_dict().items()}
    for keep in decays:
        steps(0.1, torch.randn(5, 3))
        for name, now in net.state_dict().items():
            expected[name] = keep * expected[name] + (1 - keep) * now
    for name, value in steps.averaged.state_dict().items():
        if value.is_floating_point():
            assert torch.allclose(value.double(), expected[name], rtol=1e-5, atol=1e-6), name
