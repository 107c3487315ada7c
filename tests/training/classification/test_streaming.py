"""Causal networks on the command line: trained, streamed from files and pipes, or refused."""

import csv
import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ndlightnet import NDLightNet
from ndlightnet.data.made.digits import MOTIONS
from ndlightnet.data.video.video_files import ThinVideo
from ndlightnet.data.video.video_stream import VideoStream
from ndlightnet.data.video.video_transforms import Framing, eval_clips
from ndlightnet.inference import predict_clips
from ndlightnet.training import VideoData, VideoTask
from ndlightnet.training.core.cli import task_cli
from tests.training.conftest import last

from ...data.video.made_videos import write_film

CAUSAL = "--model.causal=true"
SIZE, FRAMES = 24, 13  # the network's patch takes two frames, so the last one is half empty


def fit(classify, folder: Path, *more: str) -> Path:
    """One step on moving digits; the checkpoint."""
    data = ("--data.class_path=MovingDigits", "--data.init_args.videos=[6,6]", "--data.init_args.validation=0")
    classify("fit", *data, *more, out=folder, root=folder / "data").well()
    return last(folder)


@pytest.fixture(scope="module")
def trained(classify, tmp_path_factory) -> Path:
    """A checkpoint whose head is enlarged, so that predictions differ."""
    path = fit(classify, tmp_path_factory.mktemp("causal"), CAUSAL)
    saved = torch.load(path, weights_only=True)
    saved["state_dict"]["net.head.weight"] *= 3
    torch.save(saved, path)
    return path


def encode(path: Path, **flags: str) -> Path:
    """A block that moves over noise, 96 x 128 pixels, 25 frames a second."""
    pictures = np.random.default_rng(0).integers(0, 256, (FRAMES, 96, 128, 3), dtype=np.uint8)
    for k, picture in enumerate(pictures):
        picture[30:60, 8 * k : 8 * k + 24] = 250
    return write_film(path, pictures, options={"g": "5"}, flags=flags)


@pytest.fixture
def clip(tmp_path) -> Path:
    return encode(tmp_path / "clip.mkv")


def stream(classify, source, checkpoint, *more):
    """The command; the training data are gone."""
    return classify("stream", *more, input=source, root="/gone", ckpt=checkpoint)


def probabilities(text: str) -> torch.Tensor:
    """Of CSV lines: (lines, classes)."""
    rows = list(csv.DictReader(text.splitlines()))
    return torch.tensor([[float(row[name]) for name in MOTIONS] for row in rows])


@pytest.mark.slow
def test_lines_are_the_network_on_all_frames_so_far(trained, classify, clip):
    done = stream(classify, clip, trained).well()
    assert done.err.splitlines()[-1].startswith(f"{FRAMES} frames, ")
    rows = list(csv.DictReader(done.out.splitlines()))
    assert list(rows[0]) == ["seconds", "frame", "class", "probability", *MOTIONS]
    assert [int(row["frame"]) for row in rows] == list(range(FRAMES))
    assert [row["seconds"] for row in rows] == [f"{k / 25:.3f}" for k in range(FRAMES)]
    for row in rows:
        best = max(MOTIONS, key=lambda name: float(row[name]))
        assert (row["class"], row["probability"]) == (best, row[best])
    net = NDLightNet(3, num_classes=6, patch_size=(2, 8, 8), embed_dim=16, depth=1, causal=True)
    saved = torch.load(trained, weights_only=True)["state_dict"]
    net.load_state_dict({name.removeprefix("net."): value for name, value in saved.items()})
    video = ThinVideo(clip, [round(SIZE * 8 / 7)], FRAMES)[:]
    probs = probabilities(done.out)
    for n in range(2, FRAMES + 2, 2):  # the two lines of a patch are those of its last frame
        frames, lines = video[:n], probs[n - 2 : n]
        expected = predict_clips(net.eval(), eval_clips(frames, len(frames), Framing(SIZE))[None])[0]
        torch.testing.assert_close(lines, expected.expand(len(lines), -1), atol=2e-6, rtol=0)
    assert (probs[0] - probs[-1]).abs().max() > 0.01


@pytest.mark.slow
def test_standard_input_gives_the_same_lines(trained, classify, clip, tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=lambda: pipe.write_bytes(clip.read_bytes()), daemon=True).start()
    expected = stream(classify, clip, trained).out
    with open(pipe) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        done = stream(classify, "-", trained)
    assert (done.status, done.out) == (0, expected)


def test_lines_in_a_file_at_another_rate(trained, classify, clip, tmp_path):
    out = tmp_path / "out.csv"
    done = stream(classify, clip, trained, f"--output={out}", "--fps=12.5")
    assert (done.status, done.out) == (0, "")
    rows = list(csv.DictReader(out.open()))
    assert [int(row["frame"]) for row in rows] == list(range(0, FRAMES, 2))
    assert sorted(tmp_path.iterdir()) == [clip, out]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precision_of_the_trainer(trained, classify, clip, precision):
    done = stream(classify, clip, trained, f"--trainer.precision={precision}").well()
    exact = probabilities(stream(classify, clip, trained).out)
    assert 0 < (probabilities(done.out) - exact).abs().max() < 0.1


@pytest.mark.slow
def test_a_stream_that_is_interrupted_ends_well(trained, classify, clip, monkeypatch):
    complete, frames = stream(classify, clip, trained).out, VideoStream.__iter__

    def some(video):
        for frame in frames(video):
            yield frame
            if frame.number == 5:
                raise KeyboardInterrupt

    monkeypatch.setattr(VideoStream, "__iter__", some)
    done = stream(classify, clip, trained).well()
    assert done.out.splitlines() == complete.splitlines()[:7]


def test_of_two_films_in_a_file_the_one_read_is_named(trained, classify, tmp_path):
    film = np.zeros((4, 48, 64, 3), np.uint8)
    path = write_film(tmp_path / "a.mkv", film[:, :32], second=film, default=(0, 0))
    done = stream(classify, path, trained)
    assert done.notes == [f"note: {path}: 2 video streams, the one read is stream 1 (64 x 48 pixels)"]


@pytest.mark.slow
def test_damage_leaves_the_lines_so_far(trained, classify, tmp_path):
    path = encode(tmp_path / "a.mp4", movflags="faststart")
    complete = stream(classify, path, trained).out.splitlines()
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    done = stream(classify, path, trained)
    assert done.status == 1 and len(done.errors) == 1
    assert done.errors[0].startswith(f"error: {path}: damaged, ")
    rows = done.out.splitlines()
    assert 3 < len(rows) < FRAMES and rows[:3] == complete[:3]


def refused(done, text: str) -> None:
    assert done.status == 1 and len(done.errors) == 1, done.err[-2000:]
    assert text in done.errors[0] and "Traceback" not in done.err and done.out == ""


@pytest.mark.slow
def test_what_cannot_be_streamed(trained, classify, clip, tmp_path):
    (tmp_path / "text.mkv").write_text("this is no video")
    refused(stream(classify, tmp_path / "text.mkv", trained), "text.mkv: not a video")
    refused(stream(classify, clip, tmp_path / "gone.ckpt"), "gone.ckpt: no such checkpoint")
    refused(classify("stream", ckpt=trained), "data.input: ")
    refused(classify("stream", input=clip), "--ckpt_path: ")
    refused(stream(classify, clip, trained, f"--output={tmp_path}/text.mkv/a"), "cannot be written")


@pytest.mark.slow
def test_a_network_that_is_not_causal_is_refused(trained, classify, clip, tmp_path):
    """Also where its weights have the same shapes, which is so without MD-TPE."""
    flat = "--model.net.init_args.tpe=false"
    free, bound = fit(classify, tmp_path / "a", flat), fit(classify, tmp_path / "b", flat, CAUSAL)
    hint = "with --model.causal true"
    assert stream(classify, clip, bound, flat).status == 0
    refused(stream(classify, clip, free, flat), f"{free}: its network is not causal, train one {hint}")
    refused(stream(classify, clip, free, flat, "--model.causal=false"), hint)
    done = classify("predict", ckpt=trained, out=tmp_path / "out", input=clip)
    refused(done, f"{trained}: its network is causal, go on {hint}")


@pytest.mark.slow
def test_a_mixer_that_cannot_go_frame_by_frame(classify, clip, tmp_path):
    """It trains with the causal mask; a stream has no use for it."""
    mixer = "--model.net.init_args.mixer=ndlightnet.nn.mixers.SoftmaxAttention"
    checkpoint = fit(classify, tmp_path / "run", mixer, CAUSAL)
    refused(stream(classify, clip, checkpoint, mixer), "SoftmaxAttention has no method advance")


def test_the_config_is_printed(classify):
    done = classify("stream", CAUSAL, "--print_config")
    assert done.status == 0 and "causal: true" in done.out


@pytest.mark.parametrize(
    "options, causal",
    [
        ([], False),
        ([CAUSAL], True),
        (["--model.net.causal=true"], True),
        (["--model.net.causal=true", "--model.causal=false"], False),
    ],
)
def test_causal_reaches_the_network(options, causal):
    sizes = {"dims": 3, "num_classes": 6, "embed_dim": 8, "depth": 1}
    net = ["--model.net=ndlightnet.NDLightNet", *(f"--model.net.{name}={size}" for name, size in sizes.items())]
    task = task_cli(VideoTask, VideoData, [*net, "--data=VideoData", "--data.root=x", *options], run=False).model
    checkpoint: dict = {}
    task._trainer = SimpleNamespace(datamodule=VideoData("x"))
    task.on_save_checkpoint(checkpoint)
    assert task.net.causal == task.causal == checkpoint["causal"] == causal


@pytest.mark.slow
def test_causal_for_a_network_that_takes_none(classify, segment, tmp_path):
    sizes = {"spatial_dims": 3, "in_channels": 3, "out_channels": 6}
    net = {"class_path": "monai.networks.nets.SegResNet", "init_args": sizes}
    done = classify("fit", f"--model.net={json.dumps(net)}", CAUSAL, out=tmp_path)
    refused(done, "model.causal: monai.networks.nets.SegResNet has no argument causal")
    for arguments in (("fit", CAUSAL), ("stream",)):  # volumes have no time
        assert segment(*arguments, out=tmp_path).status == 2
    with pytest.raises(ValueError, match="causal=True: expected False"):
        VideoTask(torch.nn.Identity(), causal=True)
