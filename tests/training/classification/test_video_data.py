"""VideoData: which videos train, what a batch holds, and what a network gets."""

from __future__ import annotations

import csv
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ndlightnet.data.video.clips as clips_module
import ndlightnet.data.video.video_files as video_module
import ndlightnet.training.classification.video_data as data_module
from ndlightnet.data.errors import DataError
from ndlightnet.data.sampling import SeededSamples
from ndlightnet.data.video.video_decoders import TorchCodec
from ndlightnet.data.video.video_files import CHECKED, Sample, ThinVideo, check_videos
from ndlightnet.data.video.video_transforms import Framing, eval_clips, frame_differences
from ndlightnet.inference import predict_clips
from ndlightnet.training import VideoData, VideoTask
from ndlightnet.training.classification.video_data import OpenedVideos
from ndlightnet.training.core.data_module import training_loader
from tests.training.conftest import set_up

from ...data.video.made_videos import encode, write_film

COUNTS = {"calm": 10, "fight": 4}  # videos of a class in train; in test 2 each


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Noise of four frames, another one in each file."""
    folder, rng = tmp_path_factory.mktemp("videos"), np.random.default_rng(0)
    for part, counts in (("train", COUNTS), ("test", dict.fromkeys(COUNTS, 2))):
        for name, count in counts.items():
            for n in range(count):
                pictures = rng.integers(0, 256, (6, 32, 48, 3), dtype=np.uint8)
                encode(folder / part / name / f"{name}{n:02}.mp4", pictures)
    return folder


def made(root: Path, **options) -> VideoData:
    given = {"frames": 4, "size": 16, "batch_size": 4, "clips": 2, "workers": 0}
    return VideoData(str(root), **given | options)


def names(clips) -> list[str]:
    return [sample.path.stem for sample in clips.samples]


def test_validation_takes_neighbours(root):
    data = made(root, validation=0.2)
    data.setup("fit")
    assert names(data.val_set) == ["calm00", "calm01", "fight00"]
    assert len(data.train_set) == 11 and not {*names(data.val_set)} & {*names(data.train_set)}
    whole = made(root, validation=0)
    whole.setup("fit")
    assert len(whole.train_set) == 14 and whole.val_dataloader() == []


def test_folds_are_a_partition(root):
    held = []
    for fold in range(4):
        data = made(root, folds=4, fold=fold, test_on="fold")
        data.setup("fit")
        data.setup("test")
        assert names(data.test_set) == names(data.val_set)
        assert not {*names(data.test_set)} & {*names(data.train_set)}
        assert len(data.train_set) + len(data.val_set) == 14
        held += names(data.test_set)
    assert Counter(held) == Counter(f"{c}{n:02}" for c, count in COUNTS.items() for n in range(count))
    few = made(root, folds=4, fold=3, train_limit=4)
    few.setup("fit")
    assert len(few.train_set) == 4 and names(few.val_set) == names(data.val_set)
    assert {*names(few.train_set)} < {*names(data.train_set)}
    plain = made(root)
    plain.setup("test")
    assert names(plain.test_set) == ["calm00", "calm01", "fight00", "fight01"]


def test_groups_are_not_split(root, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    with (copy / "clips.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "patient"])
        for name, count in COUNTS.items():
            writer.writerows([f"train/{name}/{name}{n:02}.mp4", f"{n % 4}"] for n in range(count))
    for fold in range(2):
        data = made(copy, groups="patient", folds=2, fold=fold)
        data.setup("fit")
        patients = [{int(name[-2:]) % 4 for name in names(part)} for part in (data.train_set, data.val_set)]
        assert not patients[0] & patients[1] and {*range(4)} == patients[0] | patients[1]
    with pytest.raises(DataError, match=r"clips\.csv: has no column recording"):
        made(copy, groups="recording").setup("fit")


def test_rare_classes_come_up_as_often(root):
    data = made(root, balanced=True, validation=0)
    data.setup("fit")
    labels = Counter(sample.label for sample in data.train_set.samples)
    assert labels == {0: 10, 1: 10}
    assert Counter(names(data.train_set))["fight00"] == 3  # 10 visits of 4 videos: 3, 3, 2, 2


def test_a_class_without_a_video_to_train_with(root):
    one = [Sample(Path("a.mp4"), 0), *[Sample(Path("b.mp4"), 1)] * 13]
    told = "videos are held back, no video of a class is left to train with"
    with pytest.raises(DataError, match=f"8 of 14 {told}"):
        made(root, folds=2, fold=0)._split(one)
    with pytest.raises(DataError, match=f"9 of 14 {told}"):
        made(root, validation=0.6)._split(one)
    assert len(made(root)._split(one)[0]) == 13  # a tenth of one is none
    with pytest.raises(DataError, match="train_limit=1, no sample of a class is left"):
        made(root, train_limit=1)._split(one)
    with pytest.raises(DataError, match="15 samples to train with, expected 1 or more of 13"):
        made(root, train_limit=15)._split(one)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"frames": 0}, "data.frames: 0, expected 1 or more"),
        ({"frames": 1, "pixels": "both"}, "data.pixels: both, expected rgb with data.frames=1"),
        ({"crops": 2}, "data.crops: 2, expected 1 or 3"),
        ({"crops": 3, "crop_mode": "squash"}, "data.crops: 3, expected 1 with crop_mode=squash"),
        ({"scale": (0.0, 1.0)}, r"data.scale: \(0.0, 1.0\), expected two fractions above 0"),
        ({"grayscale": 1.5}, "data.grayscale: 1.5, expected a fraction from 0 to 1"),
        ({"random_erasing": -0.5}, "data.random_erasing: -0.5, expected a fraction from 0 to 1"),
        ({"mixup": -1.0}, "data.mixup: -1.0, expected 0 or more"),
        ({"batch_size": 0}, "data.batch_size: 0, expected 1 or more"),
        ({"workers": -1}, "data.workers: -1, expected 0 or more processes"),
        ({"folds": 1}, "data.folds: 1, expected 2 or more"),
        ({"folds": 3, "fold": 3}, "data.fold: 3, expected 0 to 2"),
        ({"test_on": "fold"}, "data.test_on: fold, expected test without data.fold"),
        ({"cache_gb": -1.0}, "data.cache_gb: -1.0, expected 0 or more"),
    ],
)
def test_wrong_options(root, options, message):
    with pytest.raises(DataError, match=message):
        made(root, **options)


def test_what_a_network_gets():
    clips = torch.randn(2, 3, 3, 5, 4, 4)
    rgb, changes, both = (VideoData("x", frames=5, pixels=pixels) for pixels in ("rgb", "differences", "both"))
    assert (rgb.channels, changes.channels, both.channels) == (3, 3, 6)
    assert rgb.network_input(clips) is clips
    assert torch.equal(changes.network_input(clips), frame_differences(clips))
    expected = torch.cat([clips, frame_differences(clips)], 2)
    assert torch.equal(both.network_input(clips), expected)
    one = torch.randn(3, 3, 1, 4, 4)
    assert torch.equal(changes.network_input(clips[0], one), frame_differences(clips[0], one))


class Means(nn.Module):
    """Logits: the mean of each channel of the right half of a clip, twice of the last channel."""

    def __init__(self, in_chans=3):
        super().__init__()
        self.in_chans, self.num_classes = in_chans, 2
        self.map = nn.Linear(in_chans, 2)

    def forward(self, x):
        return self.map(x[..., x.shape[-1] // 2 :].mean((2, 3, 4)))


class Trainer:
    """As much of a trainer as data and task ask for."""

    training, testing, predicting, global_rank = True, False, False, 0

    def __init__(self, data, batch=0):
        self.datamodule = data
        self.fit_loop = self.epoch_loop = self
        self.total_batch_idx = batch - 1


@pytest.mark.parametrize("mix", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
def test_mixed_batches_follow_from_the_seed_and_the_number(root, mix):
    data = made(root, validation=0, **mix)
    torch.manual_seed(0)
    data.setup("fit")
    clips, labels = torch.randn(4, 3, 4, 16, 16), torch.tensor([0, 1, 1, 0])
    batch = [clips, labels, torch.arange(4), [""] * 4]

    def at(number):
        data.trainer = Trainer(data, number)
        state = torch.get_rng_state()
        mixed, soft, numbers = data.on_after_batch_transfer(batch, 0)
        assert torch.equal(state, torch.get_rng_state()) and numbers is batch[2]
        assert type(mixed) is torch.Tensor and mixed.shape == clips.shape
        torch.testing.assert_close(soft.sum(1), torch.ones(4))
        return mixed, soft

    (one, soft), (again, same), (two, other) = at(3), at(3), at(4)
    assert torch.equal(one, again) and torch.equal(soft, same)
    assert not torch.equal(one, two) and not torch.equal(soft, other)
    # each clip is mixed with the one before, all of its frames alike: of clip 1, class 1, a part
    # comes from clip 0, class 0
    lam = soft[1, 0]
    if mix == {"mixup": 0.8}:
        torch.testing.assert_close(one[1], (1 - lam) * clips[1] + lam * clips[0])
    if mix == {"cutmix": 1.0}:
        kept = (one == clips).all(1)  # (batch, frames, height, width)
        assert torch.equal(kept, kept[:, :1].expand_as(kept))
        assert kept[1, 0].float().mean() == pytest.approx(1 - lam.item(), abs=1e-6)


def test_validation_is_never_mixed(root):
    data = made(root, mixup=1.0, validation=0.2)
    data.setup("fit")
    data.trainer = Trainer(data)
    data.trainer.training = False
    batch = next(iter(data.val_dataloader()))
    clips, labels, numbers = data.on_after_batch_transfer(batch, 0)
    assert clips is batch[0] and labels.dtype == torch.int64 and numbers.tolist() == [0, 1, 2]


def test_crops_and_erasing_reach_the_clips(root):
    plain = {"validation": 0, "scale": (1.0, 1.0), "color_jitter": 0.0, "clips": 2}
    data, erased = made(root, crops=3, **plain), made(root, random_erasing=1.0, **plain)
    for each in (data, erased):
        each.setup("fit")
        each.setup("test")
    assert data.test_set[0][0].shape == (6, 3, 4, 16, 16) and erased.test_set[0][0].shape == (2, 3, 4, 16, 16)
    (clip, *_), (other, *_) = (SeededSamples(each.train_set, 0)[0] for each in (data, erased))
    erased_cells = (clip != other).any(0)  # (frames, height, width)
    assert 0 < erased_cells.float().mean() < 1
    assert torch.equal(erased_cells, erased_cells[:1].expand_as(erased_cells))


def test_a_video_that_training_cannot_read_is_told_once(root, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    data = made(copy, validation=0)
    data.setup("fit")
    broken = copy / "train" / "calm" / "calm03.mp4"
    broken.write_text("no video")
    for _ in range(2):
        batch = torch.utils.data.default_collate([data.train_set[3], data.train_set[0]])
        _, labels, numbers = data.on_after_batch_transfer(batch, 0)
    assert numbers.tolist() == [4, 0] and labels.tolist() == [0, 0]
    said = [line for line in capsys.readouterr().err.splitlines() if "calm03" in line]
    assert len(said) == 1 and said[0].startswith(f"note: {broken}: ")
    assert said[0].endswith("; the next video replaces it")


def test_of_many_videos_some_are_opened_and_none_is_decoded(monkeypatch):
    opened = []
    monkeypatch.setattr(video_module, "_check", lambda sample: opened.append(sample.label) or [])
    samples = [Sample(Path(f"{n}.mp4"), n) for n in range(100_000)]
    check_videos(samples)
    assert len(opened) == CHECKED
    assert min(opened) < 1000 and max(opened) > 99_000
    opened.clear()
    check_videos(samples[:20])
    assert sorted(opened) == [*range(20)]


def test_of_two_films_in_a_file_the_one_read_is_told(root, tmp_path, capsys):
    copy = shutil.copytree(root, tmp_path / "videos")
    films = np.zeros((2, 6, 32, 48, 3), np.uint8)
    for split in ("train", "test"):
        write_film(copy / split / "calm" / "two.mkv", films[0], second=films[1])
    data = made(copy, input=str(copy / "test" / "calm"))
    note = "two.mkv: 2 video streams, the one read is stream 0 (48 x 32 pixels)"
    for stage in ("fit", "test"):
        data.setup(stage)
        assert capsys.readouterr().err.count(note) == 1
    list(data.predict_dataloader())
    assert capsys.readouterr().err == f"note: {copy / 'test' / 'calm' / note}\n"


def test_setup_decodes_no_video(root, monkeypatch):
    monkeypatch.setattr(clips_module, "open_for_clips", lambda *_: pytest.fail("decoded"))
    data = made(root)
    data.setup("fit")
    data.setup("test")


def test_nvdec_needs_a_gpu_and_torchcodec(root, monkeypatch):
    monkeypatch.setattr(data_module, "decoders", lambda: ())
    with pytest.raises(DataError, match=r"^data\.nvdec: True, expected false without a GPU"):
        made(root, nvdec=True).setup("fit")


@pytest.mark.parametrize("nvdec, device", [(True, "cuda:1"), (False, "cpu")])
def test_the_gpu_of_a_process_decodes_for_its_workers(root, monkeypatch, nvdec, device):
    """They are spawned: a forked process cannot use CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(data_module, "decoders", lambda: (TorchCodec,))
    for workers in (0, 2):
        data = made(root, nvdec=nvdec, workers=workers)
        data.setup("fit")
        data.setup("test")
        sets = (data.train_set, data.val_set, data.test_set, OpenedVideos([], data))
        assert {found.device for found in sets} == {device}
        for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
            method = getattr(loader.multiprocessing_context, "get_start_method", lambda: None)()
            assert method == ("spawn" if nvdec and workers else None)


@pytest.mark.slow
def test_spawned_workers_read_the_same(root):
    data = made(root)
    data.setup("fit")
    whole = SeededSamples(data.train_set, data.seed)
    one, other = (training_loader(whole, 8, 4, workers, spawned=True) for workers in (0, 1))
    for batch, same in zip(one, other, strict=True):
        assert torch.equal(batch[0], same[0]) and torch.equal(batch[1], same[1])


@pytest.mark.parametrize("pixels", ["rgb", "differences", "both"])
def test_a_task_gives_networks_what_the_data_say(root, pixels):
    """In training and elsewhere, with mirror images."""
    torch.manual_seed(0)
    data = made(root, pixels=pixels)
    data.setup("fit")
    net = Means(data.channels)
    task = VideoTask(net, mirror=True, label_smoothing=0.0)
    task._trainer, task.log = Trainer(data), lambda *_, **__: None
    clips, labels = torch.randn(2, 3, 4, 16, 16), torch.tensor([0, 1])
    loss = task.training_step((clips, labels, labels), 0)
    seen = data.network_input(clips)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(net(seen), labels))
    several = torch.randn(2, 5, 3, 4, 16, 16)
    found = task.probabilities(several)
    ways = [predict_clips(net, data.network_input(some)) for some in (several, several.flip(-1))]
    torch.testing.assert_close(found, (ways[0] + ways[1]) / 2)
    assert not torch.allclose(ways[0], ways[1])
    assert task.example_inputs()[0].shape == (4, data.channels, 4, 16, 16)


def test_a_network_of_other_channels_or_classes(root):
    with pytest.raises(DataError, match="expected a network with in_chans=6, got 3"):
        set_up(VideoTask(Means(3)), made(root, pixels="both"))
    net = Means(3)
    net.num_classes = 7
    with pytest.raises(DataError, match=f"{root}: expected a network with num_classes=2, got 7"):
        set_up(VideoTask(net), made(root))


RUN = (
    "--data.init_args.pixels=differences",
    "--data.init_args.crop_mode=squash",
    "--model.net.init_args.num_classes=2",
)


@pytest.fixture(scope="module")
def trained(classify, root, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run")
    done = classify(
        "fit",
        *RUN,
        f"--trainer.default_root_dir={out}",
        f"--data.init_args.root={root}",
        "--model.causal=true",
        "--data.init_args.mixup=0.5",
        "--trainer.max_epochs=3",
    )
    assert (done.status, done.errors) == (0, [])
    return out / "checkpoints" / "last.ckpt"


def test_a_stream_sees_the_differences_that_training_saw(trained, classify, root, tmp_path):
    video = root / "test" / "calm" / "calm00.mp4"
    done = classify(
        "stream",
        *RUN,
        f"--trainer.default_root_dir={tmp_path}",
        "--data.init_args.root=/gone",
        "--model.causal=true",
        f"--data.init_args.input={video}",
        f"--ckpt_path={trained}",
    )
    assert (done.status, done.errors) == (0, [])
    rows = list(csv.DictReader(done.out.splitlines()))
    from ndlightnet import NDLightNet

    net = NDLightNet(3, num_classes=2, patch_size=(2, 8, 8), embed_dim=16, depth=1, causal=True)
    saved = torch.load(trained, weights_only=True)["state_dict"]
    net.load_state_dict({name.removeprefix("net."): value for name, value in saved.items()})
    framing = Framing(24, "squash")
    clip = eval_clips(ThinVideo(video, framing.stored, 6)[:], 6, framing)[None]
    expected = predict_clips(net.eval(), frame_differences(clip))[0]
    found = torch.tensor([float(rows[-1][name]) for name in ("calm", "fight")])
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
