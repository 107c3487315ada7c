"""VideoData: which videos train, what a batch holds, and what a network gets."""

from __future__ import annotations

import csv
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import ndlightnet.data.video.clips as clips_module
import ndlightnet.data.video.video_files as video_module
import ndlightnet.training.classification.video_data as data_module
from ndlightnet import NDLightNet
from ndlightnet.data.errors import DataError
from ndlightnet.data.sampling import SeededSamples
from ndlightnet.data.video.video_decoders import TorchCodec
from ndlightnet.data.video.video_files import CHECKED, Sample, ThinVideo, check_videos
from ndlightnet.data.video.video_transforms import Framing, eval_clips, frame_differences
from ndlightnet.inference import predict_clips
from ndlightnet.training import VideoData, VideoTask
from ndlightnet.training.classification.video_data import OpenedVideos
from ndlightnet.training.core.data_module import DataModule
from tests.training.conftest import last, set_up
from tests.training.forked import PROCESSES

from ...data.video.made_videos import encode, write_film

COUNTS = {"calm": 10, "fight": 4}  # videos of a class in train; in test 2 each


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Noise of four frames, another one in each file."""
    folder, rng = tmp_path_factory.mktemp("videos"), np.random.default_rng(0)
    for split, counts in (("train", COUNTS), ("test", dict.fromkeys(COUNTS, 2))):
        for name, count in counts.items():
            for n in range(count):
                pictures = rng.integers(0, 256, (6, 32, 48, 3), dtype=np.uint8)
                encode(folder / split / name / f"{name}{n:02}.mp4", pictures)
    return folder


def video_data(root: Path, stage: str | None = None, **options) -> VideoData:
    data = VideoData(str(root), **{"frames": 4, "size": 16, "batch_size": 4, "clips": 2, "workers": 0} | options)
    if stage:
        data.setup(stage)
    return data


def names(clips) -> list[str]:
    return [sample.path.stem for sample in clips.samples]


def test_validation_takes_neighbours(root):
    data = video_data(root, "fit", validation=0.2)
    assert names(data.val_set) == ["calm00", "calm01", "fight00"]
    assert len(data.train_set) == 11 and not {*names(data.val_set)} & {*names(data.train_set)}
    data = video_data(root, "fit", validation=0)
    assert len(data.train_set) == 14 and data.val_dataloader() == []


def test_folds_are_a_partition(root):
    held = []
    for fold in range(4):
        data = video_data(root, "fit", folds=4, fold=fold, test_on="fold")
        data.setup("test")
        assert names(data.test_set) == names(data.val_set)
        assert not {*names(data.test_set)} & {*names(data.train_set)}
        assert len(data.train_set) + len(data.val_set) == 14
        held += names(data.test_set)
    assert Counter(held) == Counter(f"{c}{n:02}" for c, count in COUNTS.items() for n in range(count))
    few = video_data(root, "fit", folds=4, fold=3, train_limit=4)
    assert len(few.train_set) == 4 and names(few.val_set) == names(data.val_set)
    assert {*names(few.train_set)} < {*names(data.train_set)}
    assert names(video_data(root, "test").test_set) == ["calm00", "calm01", "fight00", "fight01"]


def test_no_patient_is_on_both_sides(root, tmp_path):
    """Of a validation and of folds, also with validation=0, which holds nothing back by itself."""
    copy = shutil.copytree(root, tmp_path / "copy")
    videos = [f"train/{name}/{name}{n:02}.mp4,{n % 4}" for name, count in COUNTS.items() for n in range(count)]
    (copy / "clips.csv").write_text("\n".join(["path,patient", *videos]))
    for split in ({"fold": 0}, {"fold": 1}, {"validation": 0.5}):
        data = video_data(copy, "fit", groups="patient", folds=2, **{"validation": 0.0, **split})
        train, held = ({int(name[-2:]) % 4 for name in names(clips)} for clips in (data.train_set, data.val_set))
        assert held and not train & held and {*range(4)} == train | held
    with pytest.raises(DataError, match=r"clips\.csv: has no column recording"):
        video_data(copy, "fit", groups="recording")


def test_rare_classes_come_up_as_often(root):
    data = video_data(root, "fit", balanced=True, validation=0)
    assert Counter(sample.label for sample in data.train_set.samples) == {0: 10, 1: 10}
    assert Counter(names(data.train_set))["fight00"] == 3  # 10 visits of 4 videos: 3, 3, 2, 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"folds": 2, "fold": 0}, "8 of 14 videos are held back, no video of a class is left to train with"),
        ({"validation": 0.6}, "9 of 14 videos are held back, no video of a class is left to train with"),
        ({"train_limit": 1}, "train_limit=1, no sample of a class is left"),
        ({"train_limit": 15}, "15 samples to train with, expected 1 or more of 13"),
    ],
)
def test_a_class_without_a_video_to_train_with(root, options, words):
    samples = [Sample(Path("a.mp4"), 0), *[Sample(Path("b.mp4"), 1)] * 13]
    assert len(video_data(root)._split(samples)[0]) == 13  # a tenth of one is none
    with pytest.raises(DataError, match=words):
        video_data(root, **options)._split(samples)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"frames": 0}, "data.frames: 0, expected 1 or more"),
        ({"frames": 1, "pixels": "both"}, "data.pixels: both, expected rgb with data.frames=1"),
        ({"crops": 2}, "data.crops: 2, expected 1 or 3"),
        ({"crops": 3, "crop_mode": "squash"}, "data.crops: 3, expected 1 with crop_mode=squash"),
        ({"scale": (0.0, 1.0)}, r"data.scale: \(0.0, 1.0\), expected two fractions above 0"),
        ({"grayscale": 1.5}, "data.grayscale: 1.5, expected a fraction from 0 to 1"),
        ({"mixup": -1.0}, "data.mixup: -1.0, expected 0 or more"),
        ({"folds": 1}, "data.folds: 1, expected 2 or more"),
        ({"folds": 3, "fold": 3}, "data.fold: 3, expected 0 to 2"),
        ({"test_on": "fold"}, "data.test_on: fold, expected test without data.fold"),
        ({"cache_gb": -1.0}, "data.cache_gb: -1.0, expected 0 or more"),
    ],
)
def test_wrong_options(root, options, message):
    with pytest.raises(DataError, match=message):
        video_data(root, **options)


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

    def __init__(self, in_chans=3, classes=2):
        super().__init__()
        self.in_chans, self.num_classes = in_chans, classes
        self.map = nn.Linear(in_chans, 2)

    def forward(self, x):
        return self.map(x[..., x.shape[-1] // 2 :].mean((2, 3, 4)))


def trainer(data: VideoData, batch: int = 0, training: bool = True) -> SimpleNamespace:
    """As much of a trainer as data and task ask for, before the batch of this number."""
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(total_batch_idx=batch - 1))
    stages = {"training": training, "testing": False, "predicting": False}
    return SimpleNamespace(datamodule=data, fit_loop=loop, global_rank=0, **stages)


@pytest.mark.parametrize("mix", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
def test_mixed_batches_follow_from_the_seed_and_the_number(root, mix):
    data = video_data(root, "fit", validation=0, **mix)
    clips, labels = torch.randn(4, 3, 4, 16, 16), torch.tensor([0, 1, 1, 0])
    batch = [clips, labels, torch.arange(4), [""] * 4]

    def at(number):
        data.trainer = trainer(data, number)
        state = torch.get_rng_state()
        mixed, soft, numbers = data.on_after_batch_transfer(batch, 0)
        assert torch.equal(state, torch.get_rng_state()) and numbers is batch[2]
        assert type(mixed) is torch.Tensor and mixed.shape == clips.shape
        torch.testing.assert_close(soft.sum(1), torch.ones(4))
        return mixed, soft

    (one, soft), (again, same), (two, different) = at(3), at(3), at(4)
    assert torch.equal(one, again) and torch.equal(soft, same)
    assert not torch.equal(one, two) and not torch.equal(soft, different)
    # each clip is mixed with the one before, all of its frames alike: clip 1, class 1, with clip 0, class 0
    lam = soft[1, 0]
    if mix == {"mixup": 0.8}:
        torch.testing.assert_close(one[1], (1 - lam) * clips[1] + lam * clips[0])
    if mix == {"cutmix": 1.0}:
        same_cells = (one == clips).all(1)  # (batch, frames, height, width)
        assert torch.equal(same_cells, same_cells[:, :1].expand_as(same_cells))
        assert same_cells[1, 0].float().mean() == pytest.approx(1 - lam.item(), abs=1e-6)


def test_validation_is_never_mixed(root):
    data = video_data(root, "fit", mixup=1.0, validation=0.2)
    data.trainer = trainer(data, training=False)
    batch = next(iter(data.val_dataloader()))
    clips, labels, numbers = data.on_after_batch_transfer(batch, 0)
    assert clips is batch[0] and labels.dtype == torch.int64 and numbers.tolist() == [0, 1, 2]


def test_crops_and_erasing_reach_the_clips(root):
    plain = {"validation": 0, "scale": (1.0, 1.0), "color_jitter": 0.0}
    data, erased = video_data(root, "fit", crops=3, **plain), video_data(root, "fit", random_erasing=1.0, **plain)
    for each, clips in ((data, 6), (erased, 2)):
        each.setup("test")
        assert each.test_set[0][0].shape == (clips, 3, 4, 16, 16)
    (clip, *_), (changed, *_) = (SeededSamples(each.train_set, 0)[0] for each in (data, erased))
    erased_cells = (clip != changed).any(0)  # (frames, height, width)
    assert 0 < erased_cells.float().mean() < 1
    assert torch.equal(erased_cells, erased_cells[:1].expand_as(erased_cells))


def test_a_video_that_training_cannot_read_is_named_once(root, tmp_path, capsys):
    copy = shutil.copytree(root, tmp_path / "copy")
    data = video_data(copy, "fit", validation=0)
    broken = copy / "train" / "calm" / "calm03.mp4"
    broken.write_text("no video")
    for _ in range(2):
        batch = torch.utils.data.default_collate([data.train_set[3], data.train_set[0]])
        _, labels, numbers = data.on_after_batch_transfer(batch, 0)
    assert numbers.tolist() == [4, 0] and labels.tolist() == [0, 0]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "calm03" in line]
    assert line.startswith(f"note: {broken}: ") and line.endswith("; the next video replaces it")


def test_of_many_videos_some_are_opened_and_none_is_decoded(monkeypatch):
    opened = []
    monkeypatch.setattr(video_module, "_check", lambda sample: opened.append(sample.label) or [])
    samples = [Sample(Path(f"{n}.mp4"), n) for n in range(10_000)]
    check_videos(samples)
    assert len(opened) == CHECKED
    assert min(opened) < 100 and max(opened) > 9_900
    opened.clear()
    check_videos(samples[:20])
    assert sorted(opened) == [*range(20)]


def test_of_two_films_in_a_file_the_one_read_is_named(root, tmp_path, capsys):
    copy = shutil.copytree(root, tmp_path / "videos")
    films = np.zeros((2, 6, 32, 48, 3), np.uint8)
    for split in ("train", "test"):
        write_film(copy / split / "calm" / "two.mkv", films[0], second=films[1])
    data = video_data(copy, input=str(copy / "test" / "calm"))
    note = "two.mkv: 2 video streams, the one read is stream 0 (48 x 32 pixels)"
    for stage in ("fit", "test"):
        data.setup(stage)
        assert capsys.readouterr().err.count(note) == 1
    list(data.predict_dataloader())
    assert capsys.readouterr().err == f"note: {copy / 'test' / 'calm' / note}\n"


def test_setup_decodes_no_video(root, monkeypatch):
    monkeypatch.setattr(clips_module, "open_for_clips", lambda *_: pytest.fail("decoded"))
    video_data(root, "fit").setup("test")


def test_nvdec_needs_a_gpu_and_torchcodec(root, monkeypatch):
    monkeypatch.setattr(data_module, "decoders", lambda: ())
    with pytest.raises(DataError, match=r"^data\.nvdec: True, expected false without a GPU"):
        video_data(root, "fit", nvdec=True)


@pytest.mark.parametrize("nvdec, device", [(True, "cuda:1"), (False, "cpu")])
def test_the_gpu_of_a_process_decodes_for_its_workers(root, monkeypatch, nvdec, device):
    """They are spawned: a forked process cannot use CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(data_module, "decoders", lambda: (TorchCodec,))
    for workers in (0, 2):
        data = video_data(root, "fit", nvdec=nvdec, workers=workers)
        data.setup("test")
        sets = (data.train_set, data.val_set, data.test_set, OpenedVideos([], data))
        assert {dataset.device for dataset in sets} == {device}
        for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
            method = getattr(loader.multiprocessing_context, "get_start_method", lambda: None)()
            assert method == ("spawn" if nvdec and workers else None)


@pytest.mark.slow
def test_workers_that_are_not_forked_read_the_same(root):
    """As a spawned one they know what is pickled, and no more."""
    data = video_data(root, "fit")
    samples = SeededSamples(data.train_set, data.seed)
    loaders = [DataModule(".", 4, workers).training_loader(samples, 8) for workers in (0, 1)]
    loaders[1].multiprocessing_context = PROCESSES
    for batch, same in zip(*loaders, strict=True):
        assert torch.equal(batch[0], same[0]) and torch.equal(batch[1], same[1])


@pytest.mark.parametrize("pixels", ["rgb", "differences", "both"])
def test_a_task_gives_networks_what_the_data_say(root, pixels):
    """In training and elsewhere, with mirror images."""
    data = video_data(root, "fit", pixels=pixels)
    net = Means(data.channels)
    task = VideoTask(net, mirror=True, label_smoothing=0.0)
    task._trainer, task.log = trainer(data), lambda *_, **__: None
    clips, labels = torch.randn(2, 3, 4, 16, 16), torch.tensor([0, 1])
    loss = task.training_step((clips, labels, labels), 0)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(net(data.network_input(clips)), labels))
    several = torch.randn(2, 5, 3, 4, 16, 16)
    probs = task.probabilities(several)
    ways = [predict_clips(net, data.network_input(some)) for some in (several, several.flip(-1))]
    torch.testing.assert_close(probs, (ways[0] + ways[1]) / 2)
    assert not torch.allclose(ways[0], ways[1])
    assert task.example_inputs()[0].shape == (4, data.channels, 4, 16, 16)


def test_a_network_of_other_channels_or_classes(root):
    for net, pixels, words in (
        (Means(), "both", "in_chans=6, got 3"),
        (Means(classes=7), "rgb", "num_classes=2, got 7"),
    ):
        with pytest.raises(DataError, match=f"{root}: expected a network with {words}"):
            set_up(VideoTask(net), video_data(root, pixels=pixels))


def test_a_stream_sees_the_differences_that_training_saw(classify, root, tmp_path):
    data, net, model = {"pixels": "differences", "crop_mode": "squash"}, {"num_classes": 2}, {"causal": True}
    common = {"out": tmp_path, "net": net, "model": model}
    classify("fit", "--trainer.max_epochs=3", root=root, data={**data, "mixup": 0.5}, **common).well()
    video = root / "test" / "calm" / "calm00.mp4"
    done = classify("stream", root="/gone", input=video, ckpt=last(tmp_path), data=data, **common).well()
    rows = list(csv.DictReader(done.out.splitlines()))
    net = NDLightNet(3, num_classes=2, patch_size=(2, 8, 8), embed_dim=16, depth=1, causal=True)
    saved = torch.load(last(tmp_path), weights_only=True)["state_dict"]
    net.load_state_dict({name.removeprefix("net."): value for name, value in saved.items()})
    framing = Framing(24, "squash")
    clip = eval_clips(ThinVideo(video, framing.stored, 6)[:], 6, framing)[None]
    expected = predict_clips(net.eval(), frame_differences(clip))[0]
    probs = torch.tensor([float(rows[-1][name]) for name in ("calm", "fight")])
    torch.testing.assert_close(probs, expected, atol=2e-6, rtol=0)
