"""Bad input ends a command with status 1 and one line that names the file; no result is left.

Values are refused by the classes that take them, in milliseconds; of each class of error one goes
through the command line.
"""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from ndlightnet.data.errors import DataError
from ndlightnet.data.volume.augment import Augment
from ndlightnet.training import SegmentationTask, VideoData, VideoTask, VolumeData, run
from ndlightnet.training.core.checkpoints import check_checkpoint
from ndlightnet.training.core.cli import RESUMED

NET2 = ("--data.init_args.patch=[8,8,8]", "--model.net.init_args.out_channels=2")


def check(done, out: Path, text: str) -> None:
    """One line that begins with `error: TEXT`, nothing after it, no result under `out`."""
    assert done.status == 1
    assert len(done.errors) == 1, done.err[-2000:]
    assert done.errors[0].startswith(f"error: {text}"), done.errors[0]
    assert done.err.splitlines()[-1] == done.errors[0] and "Traceback" not in done.err
    assert not list(out.rglob("*"))


def volumes(out: Path, root: Path, *more: str) -> tuple[str, ...]:
    return (f"--trainer.default_root_dir={out}", f"--data.init_args.root={root}", *NET2, *more)


@pytest.fixture(scope="module")
def fitted(segment, write_decathlon, tmp_path_factory) -> tuple[Path, Path, dict]:
    """A folder of data, the checkpoint of a training on it, and what is in that."""
    folder = tmp_path_factory.mktemp("fitted")
    root = write_decathlon(folder / "volumes")
    assert segment("fit", *volumes(folder / "out", root)).status == 0
    file = folder / "out" / "checkpoints" / "last.ckpt"
    return root, file, torch.load(file, weights_only=True)


@pytest.mark.slow
def test_the_good_folder_passes(segment, fitted):
    """Otherwise the tests below would say nothing."""
    root, file, _ = fitted
    out = file.parents[1]
    assert segment("test", *volumes(out, root)).status == 0
    assert json.loads((out / "metrics.json").read_text())["cases"][0]["name"] == "3"


def test_a_missing_folder_a_truncated_volume_and_a_network_that_does_not_fit(segment, decathlon, tmp_path):
    """Raised by the constructor of the data, by a reader in the middle of a training, and by a setup."""
    gone, file = tmp_path / "gone", decathlon / "images" / "0.nii.gz"
    check(segment("fit", *volumes(tmp_path / "a", gone)), tmp_path / "a", f"{gone}: no such file or folder (data.root=")
    for side, channels in (("out", 2), ("in", 1)):
        done = segment("fit", *volumes(tmp_path / side, decathlon, f"--model.net.init_args.{side}_channels=5"))
        line = f"{decathlon}: expected a network with {side}_channels={channels}, got 5"
        check(done, tmp_path / side, line)
    file.write_bytes(file.read_bytes()[:200])
    check(segment("fit", *volumes(tmp_path / "c", decathlon)), tmp_path / "c", f"{file}: cannot be read")


@pytest.mark.parametrize("split, stage", [("training", "fit"), ("test", "test")])
def test_too_few_cases(decathlon, split, stage):
    listing = json.loads((decathlon / "dataset.json").read_text())
    (decathlon / "dataset.json").write_text(json.dumps({**listing, split: []}))
    with pytest.raises(DataError, match=f"^{decathlon}: "):
        VolumeData(str(decathlon), [8, 8, 8]).setup(stage)


@pytest.mark.parametrize("command", ["fit", "predict"])
def test_unwritable_output(segment, decathlon, tmp_path, command):
    (tmp_path / "file").write_text("here first")
    out = tmp_path / "file" / "out"
    done = segment(command, f"--trainer.default_root_dir={out}", f"--data.init_args.root={decathlon}")
    check(done, out, f"{out}")
    assert "cannot be written" in done.errors[0] and (tmp_path / "file").read_text() == "here first"


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_a_file_that_is_no_video(tmp_path, stage):
    for file in [tmp_path / split / name / "1.mp4" for split in ("train", "test") for name in ("a", "b")]:
        file.parent.mkdir(parents=True)
        file.write_text("no video")
    split = "train" if stage == "fit" else "test"
    with pytest.raises(DataError, match=rf"^{tmp_path}/{split}/[ab]/1\.mp4: not a video"):
        VideoData(str(tmp_path)).setup(stage)
    with pytest.raises(DataError, match=f"^{tmp_path}/gone: no such folder"):
        VideoData(f"{tmp_path}/gone").setup(stage)


def test_predict_without_input_or_checkpoint(segment, tmp_path):
    """An untrained network has nothing to say, and the labels' names would be missing."""
    for kind in (VideoData, partial(VolumeData, patch=[8, 8, 8])):
        with pytest.raises(DataError, match=r"^data\.input: expected "):
            kind(str(tmp_path)).predict_dataloader()
    done = segment("predict", *volumes(tmp_path / "out", tmp_path, f"--data.init_args.input={tmp_path}"))
    check(done, tmp_path / "out", "--ckpt_path: ")


# ------------------------------------------------------------------------------------ checkpoints
@pytest.mark.parametrize("kind", ["gone", "a folder", "text"])
def test_what_is_no_checkpoint(segment, decathlon, tmp_path, kind):
    path, expected = tmp_path / "x.ckpt", "expected "
    if kind == "text":
        path.write_text("no checkpoint")
        expected = "not a checkpoint of ours"
    elif kind == "a folder":
        (path / "checkpoints").mkdir(parents=True)
        (path / "checkpoints" / "last.ckpt").write_text("")
        expected = f"a folder, expected {path}/checkpoints/last.ckpt"
    with pytest.raises(DataError, match=f"^{path}: .*{expected}"):
        check_checkpoint(str(path), SegmentationTask(nn.Identity()), VolumeData("x", [8, 8, 8]))
    for command in ("fit", "test", "predict") if kind == "gone" else ():
        done = segment(command, *volumes(tmp_path / "out", decathlon, f"--ckpt_path={path}"))
        check(done, tmp_path / "out", f"{path}: no such checkpoint, expected ")


@pytest.mark.slow
def test_checkpoint_of_another_network(segment, fitted, tmp_path):
    root, file, _ = fitted
    out, wider = tmp_path / "out", "--model.net.init_args.widths=[4,12]"
    done = segment("test", *volumes(out, root, wider, f"--ckpt_path={file}"))
    check(done, out, f"{file}: the checkpoint of another network: widths is [4, 8] there, [4, 12] here")


@pytest.mark.slow
def test_entries_that_a_checkpoint_lacks(segment, fitted, tmp_path):
    root, checkpoint, saved = fitted
    task, data = SegmentationTask(nn.Identity()), VolumeData("x", [8, 8, 8])
    assert {"state_dict", *task.saved, *RESUMED, "network", "task"} == set(saved)
    file, name = tmp_path / "odd.ckpt", next(iter(saved["state_dict"]))
    less = {key: value for key, value in saved["state_dict"].items() if key != name}
    for content, reason in (
        *(({k: saved[k] for k in saved if k != key}, f"lacks {key}, expected") for key in (*task.saved, *RESUMED)),
        ({"state_dict": saved["state_dict"]}, "the checkpoint lacks names"),
        ({**saved, "names": {"modalities": ["CT"]}}, "names has no list labels, expected one"),
        ({**saved, "names": 5}, "names has no list labels, modalities, expected one"),
        ({**saved, "state_dict": {name: 1}}, "state_dict holds no weights, expected one"),
        ({**saved, "state_dict": [1]}, "state_dict holds no weights, expected one"),
        ([saved], "not a checkpoint of ours"),
    ):
        torch.save(content, file)
        with pytest.raises(DataError, match=f"^{file}: .*{reason}"):
            check_checkpoint(str(file), task, data, (*task.saved, *RESUMED))
    for key, command in (("ema_dice", "test"), ("loops", "fit")):
        torch.save({k: value for k, value in saved.items() if k != key}, file)
        done = segment(command, *volumes(tmp_path / "out", root, f"--ckpt_path={file}"))
        check(done, tmp_path / "out", f"{file}: the checkpoint lacks {key}")
    torch.save({**saved, "state_dict": less}, file)
    both = (f"--ckpt_path={checkpoint}", f"--model.ensemble=['{file}']")
    done = segment("test", *volumes(tmp_path / "out", root, *both))
    check(done, tmp_path / "out", f"{file}: the checkpoint of another network: {name} is none there")


@pytest.mark.slow
def test_an_ensemble_of_other_labels(segment, fitted, tmp_path):
    root, file, saved = fitted
    torch.save({**saved, "names": {**saved["names"], "labels": ["background", "ball"]}}, tmp_path / "other.ckpt")
    more = (f"--data.init_args.input={root}/images", f"--ckpt_path={file}")
    for path, reason in ((tmp_path / "other.ckpt", "was trained on"), (tmp_path / "gone.ckpt", "no such checkpoint")):
        done = segment("predict", *volumes(tmp_path / "out", Path("/gone"), *more, f"--model.ensemble=['{path}']"))
        check(done, tmp_path / "out", f"{path}: {reason}")


# ---------------------------------------------------------------------------------------- options
VOLUMES = [
    *({"patch": patch} for patch in ([8], [8, 8, 0])),
    *({"spacing": spacing} for spacing in ([1, 1], [1, 1, 0], [1, 1, float("inf")])),
    *({"batch_size": 0}, {"batches": 0}, {"workers": -1}, {"folds": 1}, {"fold": 5}, {"fold": -1}),
    *({"foreground": 1.5}, {"foreground": -0.5}, {"augment": Augment(flip_axes=(3,))}),
]
SEGMENTATION = [
    *({"window": [8]}, {"window": [0, 8, 8]}, {"overlap": 1.0}),
    *({"mirror_axes": [0, 0]}, {"mirror_axes": [-1]}),
]


@pytest.mark.parametrize("options", VOLUMES)
def test_values_that_volumes_refuse(options):
    with pytest.raises(DataError, match=f"^data.{next(iter(options))}.*: .*, expected "):
        VolumeData("/gone", **{"patch": [8, 8, 8]} | options)


@pytest.mark.parametrize("options", SEGMENTATION)
def test_values_that_segmentation_refuses(options):
    with pytest.raises(DataError, match=f"^model.{next(iter(options))}: .*, expected "):
        SegmentationTask(nn.Identity(), **options)


@pytest.mark.parametrize("options", [{"channels": [1]}, {"channels": []}, {"intensities": "two"}])
def test_channels_and_intensities_that_do_not_fit(decathlon, options):
    from ndlightnet.data.volume.transforms import Intensity

    options = {k: [Intensity()] * 2 if v == "two" else v for k, v in options.items()}
    with pytest.raises(DataError, match=f"^data.{next(iter(options))}: "):
        VolumeData(str(decathlon), [8, 8, 8], **options).setup("fit")


def test_more_folds_than_cases(decathlon):
    with pytest.raises(DataError, match=f"^{decathlon}: 3 training cases, expected at least 4"):
        VolumeData(str(decathlon), [8, 8, 8], fold=0, folds=4).setup("fit")


@pytest.mark.parametrize(
    "option, text",
    [
        ("data.init_args.foreground=1.5", "data.foreground: 1.5, expected a fraction"),
        ("trainer.precision=bf16-true", "trainer.precision: bf16-true, expected 32-true, bf16-mixed or 16-mixed"),
        ("model.net.init_args.strides=[2,2]", "widths=[4, 8]: expected 3 numbers"),
    ],
)
def test_a_refused_value_is_one_line(segment, decathlon, tmp_path, option, text):
    check(segment("fit", *volumes(tmp_path / "out", decathlon, f"--{option}")), tmp_path / "out", text)


NO_ARGUMENT = "has no such argument; did you mean"


@pytest.mark.parametrize(
    "option, line",
    [
        ("--modle.lr=3", "unrecognized arguments: --modle.lr=3; did you mean --model.lr?"),
        ("--trainer.max_epoch=3", "unrecognized arguments: --trainer.max_epoch=3; did you mean --trainer.max_epochs?"),
        ("--model.net.patch=3", f"model.net.patch: ndlightnet.NDLightNet {NO_ARGUMENT} patch_size?"),
        ("--model.net.init_args.dim=3", f"model.net.dim: ndlightnet.NDLightNet {NO_ARGUMENT} embed_dim?"),
        ("--data.init_args.fraems=3", f"data.fraems: ndlightnet.training.VideoData {NO_ARGUMENT} frames?"),
        (
            "--data={class_path: ndlightnet.training.MovingDigits, init_args: {frmes: 3}}",
            f"data.frmes: ndlightnet.training.MovingDigits {NO_ARGUMENT} frames?",
        ),
        ("--data.frames=x", "data.frames: x, expected int"),
        (
            "--trainer.callbacks={class_path: ndlightnet.training.AveragedWeights, init_args: {decay: x}}",
            "trainer.callbacks.decay: x, expected float",
        ),
        ("--model.lr=[1, 2]", "model.lr: [1, 2], expected float"),
        ("--trainer.max_epochs=many", "trainer.max_epochs: many, expected int or null"),
        ("--data=Images", "data: Images, expected path or dot import path"),
        ("--model.net=ndlightnet.NDLightNett", "module 'ndlightnet' has no attribute 'NDLightNett'"),
    ],
)
def test_a_wrong_option_is_one_line(classify, tmp_path, option, line):
    """With the name, the value and what is expected, without jsonargparse's pages of usage."""
    done = classify("fit", f"--trainer.default_root_dir={tmp_path}", option)
    assert done.status == 2 and re.fullmatch(f"error: .*{re.escape(line)}\n", done.err), done.err
    assert line.startswith("module") or done.err == f"error: {line}\n"
    assert not any(tmp_path.iterdir())


def test_a_wrong_option_of_an_object_in_the_data_is_one_line(segment, tmp_path):
    done = segment("fit", f"--trainer.default_root_dir={tmp_path}", "--data.init_args.augment.flip_axes=x")
    assert (done.status, done.err) == (2, "error: data.augment.flip_axes: x, expected tuple\n")


@pytest.mark.parametrize(
    "mixer, text", [("GLAX", "mixer='ndlightnet.nn.mixers.GLAX': did you mean 'GLA'?"), ("{heads: x}", "model: ")]
)
def test_a_wrong_mixer_is_one_line(classify, tmp_path, mixer, text):
    path = "ndlightnet.nn.mixers."
    value = f"{{class_path: {path}GLA, init_args: {mixer}}}" if mixer.startswith("{") else path + mixer
    out = tmp_path / "out"
    check(classify("fit", f"--trainer.default_root_dir={out}", f"--model.net.mixer={value}"), out, text)


def test_wrong_configs_are_one_line(classify, tmp_path):
    file, out = tmp_path / "mine.yaml", tmp_path / "out"
    check(classify("fit", f"--config={file}"), out, f"{file}: no such file")
    file.write_text("a: [")
    check(classify("fit", "--config", file), out, f"{file}: is not valid YAML (line 1: ")


def test_an_unknown_command_is_one_line(capsys):
    assert run(VideoTask, VideoData, Path("x"), {"plan": print}, ["plann"]) == 2
    assert capsys.readouterr().err == "error: plann: no such command; did you mean plan?\n"
    assert run(VideoTask, VideoData, Path("x"), None, ["strem"]) == 2
    assert capsys.readouterr().err == "error: strem: no such command; did you mean stream?\n"


def test_a_task_without_predictions_says_so(listen, tmp_path):
    common = (f"--trainer.default_root_dir={tmp_path}", f"--data.init_args.root={tmp_path}")
    check(listen("predict", *common), tmp_path, "predict: SignalTask has none, expected fit,")
