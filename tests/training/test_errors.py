"""Bad input ends a command with status 1 and one line that names the file; no result is left."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from ndlightnet.training import VideoData, VideoTask, run

NET2 = ("--data.init_args.patch=[8,8,8]", "--model.net.init_args.out_channels=2")


def check(done, out: Path, text: str) -> None:
    """One line that begins with `error: TEXT`, nothing after it, no result under `out`."""
    assert done.status == 1
    assert len(done.errors) == 1, done.err[-2000:]
    assert done.errors[0].startswith(f"error: {text}"), done.errors[0]
    assert done.err.splitlines()[-1] == done.errors[0] and "Traceback" not in done.err
    left = [path.relative_to(out) for path in out.rglob("*") if path.is_file()]
    assert [p for p in left if "logs" not in p.parts and p.name != "config.yaml"] == []


def volumes(out: Path, root: Path, *more: str) -> tuple[str, ...]:
    return (f"--trainer.default_root_dir={out}", f"--data.init_args.root={root}", *NET2, *more)


@pytest.mark.slow
def test_the_good_folder_passes(segment, decathlon, tmp_path):
    """Otherwise the tests below would say nothing."""
    assert segment("fit", *volumes(tmp_path / "out", decathlon)).status == 0
    assert segment("test", *volumes(tmp_path / "out", decathlon)).status == 0
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["cases"][0]["name"] == "3"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fit", "test"])
def test_missing_data_folder(segment, classify, tmp_path, command):
    out, gone = tmp_path / "out", tmp_path / "gone"
    common = (f"--trainer.default_root_dir={out}", f"--data.init_args.root={gone}")
    for task in (segment, classify):
        check(task(command, *common), out, f"{gone}: no such folder")


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_weights_that_are_not_float32(segment, decathlon, tmp_path, precision):
    """Lightning does not convert the samples, so these would fail inside the network."""
    out = tmp_path / "out"
    done = segment("fit", *volumes(out, decathlon, f"--trainer.precision={precision}"))
    check(done, out, f"trainer.precision: {precision}, expected 32-true, bf16-mixed or 16-mixed")


# what is put in the place of a file of a case -> the file that the line has to name, and why
BAD = {
    "shape": ("labels", np.zeros((12, 10, 7), np.uint8), "has shape (12, 10, 7)"),
    "label": ("labels", np.full((12, 10, 8), 2, np.uint8), "has label values 2..2"),
    "negative": ("labels", np.full((12, 10, 8), -1, np.int16), "has label values -1..-1"),
    "fraction": ("labels", np.full((12, 10, 8), 0.5, np.float32), "not whole numbers"),
    "nan": ("images", np.full((12, 10, 8), np.nan, np.float32), "960 voxels that are NaN"),
    "axes": ("images", np.zeros((12, 10, 8, 2), np.float32), "has 2 channels, expected 1"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("command, case", [("fit", 1), ("test", 3)])
def test_bad_volume(segment, decathlon, save_volume, tmp_path, command, case, kind):
    folder, voxels, why = BAD[kind]
    file, out = save_volume(decathlon / folder / f"{case}.nii.gz", voxels), tmp_path / "out"
    done = segment(command, *volumes(out, decathlon))
    check(done, out, f"{file}: ")
    assert why in done.errors[0]


@pytest.mark.slow
def test_truncated_and_missing_volume(segment, decathlon, tmp_path):
    out, file = tmp_path / "out", decathlon / "images" / "0.nii.gz"
    file.write_bytes(file.read_bytes()[:200])
    check(segment("fit", *volumes(out, decathlon)), out, f"{file}: cannot be read")
    file.unlink()
    check(segment("fit", *volumes(out, decathlon)), out, f"{file}: no such file")


@pytest.mark.slow
def test_too_few_cases(segment, decathlon, tmp_path):
    listing = json.loads((decathlon / "dataset.json").read_text())
    for kept, command in (({"training": []}, "fit"), ({"test": []}, "test")):
        (decathlon / "dataset.json").write_text(json.dumps({**listing, **kept}))
        out = tmp_path / command
        check(segment(command, *volumes(out, decathlon)), out, f"{decathlon}: ")


@pytest.mark.parametrize("command", ["fit", "test"])
@pytest.mark.parametrize("option, have", [("out_channels", "2 labels"), ("in_channels", "1 channels")])
def test_network_that_does_not_fit(segment, decathlon, tmp_path, command, option, have):
    out = tmp_path / "out"
    done = segment(command, *volumes(out, decathlon, f"--model.net.init_args.{option}=5"))
    check(done, out, f"{decathlon}: {have}, but the network has {option}=5")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fit", "test", "predict"])
def test_unwritable_output(segment, classify, decathlon, tmp_path, command):
    (tmp_path / "file").write_text("here first")
    out = tmp_path / "file" / "out"
    for task in (segment, classify):
        data = f"--data.init_args.root={decathlon}"
        done = task(command, f"--trainer.default_root_dir={out}", data)
        check(done, out, f"{out}")
        assert "cannot be written" in done.errors[0]
    assert (tmp_path / "file").read_text() == "here first"


def clips(root: Path) -> Path:
    """Two classes with a file each that only looks like a video."""
    for split in ("train", "test"):
        for name in ("a", "b"):
            (root / split / name).mkdir(parents=True)
            (root / split / name / "1.mp4").write_text("no video")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("command, split", [("fit", "train"), ("test", "test")])
def test_bad_videos(classify, tmp_path, command, split):
    root, out = clips(tmp_path / "videos"), tmp_path / "out"
    common = (f"--trainer.default_root_dir={out}", f"--data.init_args.root={root}")
    done = classify(command, *common)
    check(done, out, f"{root}/{split}/")
    assert re.search(r"/[ab]/1\.mp4: not a video", done.errors[0])
    (root / split / "b" / "1.mp4").unlink()
    check(classify(command, *common), out, f"{root}/{split}/b: has no file to read, expected .mp4")


@pytest.mark.slow
def test_predict_without_input(segment, classify, tmp_path):
    out, gone = tmp_path / "out", tmp_path / "gone"
    common = ("predict", f"--trainer.default_root_dir={out}")
    for task in (segment, classify):
        check(task(*common), out, "data.input: ")
        check(task(*common, f"--data.init_args.input={gone}"), out, f"{gone}: no such file")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fit", "test", "predict"])
def test_missing_checkpoint(segment, decathlon, tmp_path, command):
    out, gone = tmp_path / "out", tmp_path / "gone.ckpt"
    more = (f"--data.init_args.input={decathlon}/images", f"--ckpt_path={gone}")
    done = segment(command, *volumes(out, decathlon, *more))
    check(done, out, "")
    assert str(gone) in done.errors[0]


def test_a_folder_as_checkpoint(segment, decathlon, tmp_path):
    out, folder = tmp_path / "out", tmp_path / "run"
    folder.mkdir()
    for expected in ("a checkpoint that `fit` has left", f"{folder}/checkpoints/last.ckpt"):
        done = segment("test", *volumes(out, decathlon, f"--ckpt_path={folder}"))
        check(done, out, f"{folder}: a folder, expected {expected}")
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / "checkpoints" / "last.ckpt").write_text("")


def test_checkpoint_that_is_none(segment, decathlon, tmp_path):
    out, broken = tmp_path / "out", tmp_path / "broken.ckpt"
    broken.write_text("no checkpoint")
    done = segment("test", *volumes(out, decathlon, f"--ckpt_path={broken}"))
    check(done, out, "")
    assert str(broken) in done.errors[0]


@pytest.mark.slow
def test_checkpoint_of_another_network(segment, decathlon, tmp_path):
    assert segment("fit", *volumes(tmp_path / "first", decathlon)).status == 0
    out, other = tmp_path / "out", tmp_path / "first" / "checkpoints" / "last.ckpt"
    wider = "--model.net.init_args.widths=[4,12]"
    done = segment("test", *volumes(out, decathlon, wider, f"--ckpt_path={other}"))
    check(done, out, "")
    assert str(other) in done.errors[0]


@pytest.fixture(scope="module")
def fitted(segment, write_decathlon, tmp_path_factory) -> tuple[Path, Path, dict]:
    """A folder of data, the checkpoint of a training on it, and what is in that."""
    folder = tmp_path_factory.mktemp("fitted")
    root = write_decathlon(folder / "volumes")
    assert segment("fit", *volumes(folder / "out", root)).status == 0
    file = folder / "out" / "checkpoints" / "last.ckpt"
    return root, file, torch.load(file, weights_only=True)


# of the entries of a checkpoint, those that a command asks for; `fit` also for those of `test`
ASKED = {
    "test": ("state_dict", "names", "pytorch-lightning_version", "cost", "ema_dice"),
    "fit": ("epoch", "global_step", "loops", "callbacks", "optimizer_states", "lr_schedulers"),
}


@pytest.mark.slow
@pytest.mark.parametrize("command, key", [(c, key) for c, keys in ASKED.items() for key in keys])
def test_checkpoint_without_an_entry(segment, fitted, tmp_path, command, key):
    root, _, saved = fitted
    assert set(saved) == {*ASKED["test"], *ASKED["fit"], "network"}
    file, images = tmp_path / "less.ckpt", f"--data.init_args.input={root}/images"
    torch.save({k: value for k, value in saved.items() if k != key}, file)
    for also in (command, "predict") if command == "test" else (command,):
        out = tmp_path / also
        done = segment(also, *volumes(out, root, images, f"--ckpt_path={file}"))
        check(done, out, f"{file}: the checkpoint lacks {key}, expected one that `fit` has left")


@pytest.mark.slow
def test_checkpoint_with_odd_entries(segment, fitted, tmp_path):
    root, whole, saved = fitted
    name, file, out = next(iter(saved["state_dict"])), tmp_path / "odd.ckpt", tmp_path / "out"
    less = {key: value for key, value in saved["state_dict"].items() if key != name}
    for content, why in (
        ({**saved, "names": {"modalities": ["CT"]}}, "names has no list labels, expected one"),
        ({**saved, "names": 5}, "names has no list labels, modalities, expected one"),
        ({**saved, "state_dict": {name: 1}}, "state_dict holds no weights, expected one"),
        ({**saved, "state_dict": [1]}, "state_dict holds no weights, expected one"),
        ({**saved, "state_dict": less}, f"the checkpoint of another network: {name} is none there"),
        ([saved], "not a checkpoint of ours"),
        ({"state_dict": saved["state_dict"]}, "the checkpoint lacks names"),
    ):
        torch.save(content, file)
        check(segment("test", *volumes(out, root, f"--ckpt_path={file}")), out, f"{file}: {why}")
    both = (f"--ckpt_path={whole}", f"--model.ensemble=['{file}']")
    check(segment("test", *volumes(out, root, *both)), out, f"{file}: {why}")


def test_predict_without_a_checkpoint(segment, decathlon, tmp_path):
    """An untrained network has nothing to say, and the labels' names would be missing."""
    out, given = tmp_path / "out", f"--data.init_args.input={decathlon}/images"
    done = segment("predict", *volumes(out, decathlon, given))
    check(done, out, "")


@pytest.mark.slow
def test_predict_on_another_number_of_channels(segment, decathlon, tmp_path):
    """A network for one modality, a case with two files: listed like a file that cannot be read."""
    assert segment("fit", *volumes(tmp_path / "first", decathlon)).status == 0
    listing = json.loads((decathlon / "dataset.json").read_text())
    listing["modality"] = {"0": "CT", "1": "PET"}
    listing["training"] = []
    listing["test"] = [{"image": ["images/0.nii.gz", "images/1.nii.gz"]}]
    (decathlon / "dataset.json").write_text(json.dumps(listing))
    more = (f"--data.init_args.input={decathlon}", f"--ckpt_path={tmp_path}/first/checkpoints/last.ckpt")
    done = segment("predict", *volumes(tmp_path / "out", decathlon, *more))
    check(done, tmp_path / "out", f"{decathlon}/images/0.nii.gz: ")


DOORS = {
    "model.window": ("[8]", "[0,8,8]"),
    "model.overlap": ("1.0",),
    "model.mirror_axes": ("[3]", "[0,0]", "[-1]"),
    "model.tolerance_mm": ("-1.0",),
    "data.patch": ("[8]", "[8,8,0]"),
    "data.spacing": ("[1,1]", "[1,1,0]", "[1,1,.inf]"),
    "data.batch_size": ("0",),
    "data.batches": ("0",),
    "data.foreground": ("1.5", "-0.5"),
    "data.workers": ("-1",),
    "data.folds": ("1",),
    "data.fold": ("5", "-1"),
    "data.augment.flip_axes": ("[3]",),
}


@pytest.mark.slow
@pytest.mark.parametrize("name, value", [(name, value) for name, values in DOORS.items() for value in values])
def test_a_value_is_refused_at_the_door(segment, tmp_path, name, value):
    """In the name of the argument, before any file is opened: this folder is not there."""
    out = tmp_path / "out"
    done = segment(
        "fit",
        f"--trainer.default_root_dir={out}",
        "--data.init_args.root=/gone",
        f"--{name.replace('data.', 'data.init_args.')}={value}",
    )
    check(done, out, f"{name}: ")
    assert ", expected " in done.errors[0]


# what is said by those who are not part of this room
SAID = {
    "data.init_args.augment.shift=-1": "shift=-1, turn=0.2: expected ",
    "data.init_args.intensities=[{low: 3, high: 2, mean: 0, deviation: 1}]": "Intensity(low=3.0",
    "data.init_args.intensities=[{low: 3}]": "Intensity(low=3.0",
    "model.net.init_args.widths=[4]": "convs=[1, 1]: expected 1 numbers",
    "model.net.init_args.strides=[2,2]": "widths=[4, 8]: expected 3 numbers",
}


@pytest.mark.parametrize("option", SAID)
def test_what_a_constructor_says_is_one_line(segment, tmp_path, option):
    out = tmp_path / "out"
    check(segment("fit", f"--trainer.default_root_dir={out}", f"--{option}"), out, SAID[option])


@pytest.mark.slow
def test_channels_and_intensities_that_do_not_fit(segment, decathlon, tmp_path):
    out = tmp_path / "out"
    for name, value in (("channels", "[1]"), ("channels", "[]"), ("intensities", "[{},{}]")):
        done = segment("fit", *volumes(out, decathlon, f"--data.init_args.{name}={value}"))
        check(done, out, f"data.{name}: ")


def test_more_folds_than_cases(segment, decathlon, tmp_path):
    more = ("--data.init_args.fold=0", "--data.init_args.folds=4")
    done = segment("fit", *volumes(tmp_path / "out", decathlon, *more))
    check(done, tmp_path / "out", f"{decathlon}: 3 training cases, expected at least 4")


@pytest.mark.slow
def test_an_ensemble_of_what_does_not_belong_together(segment, decathlon, tmp_path):
    def fit(name: str, *more: str) -> Path:
        assert segment("fit", *volumes(tmp_path / name, decathlon, *more)).status == 0
        return tmp_path / name / "checkpoints" / "last.ckpt"

    first, wider = fit("first"), fit("wider", "--model.net.init_args.widths=[4,12]")
    listing = json.loads((decathlon / "dataset.json").read_text())
    listing["labels"]["1"] = "ball"
    (decathlon / "dataset.json").write_text(json.dumps(listing))
    other, none, gone = fit("other"), tmp_path / "none.ckpt", tmp_path / "gone.ckpt"
    none.write_text("no checkpoint")
    images = f"--data.init_args.input={decathlon}/images"
    for path, why in (
        (gone, "no such checkpoint"),
        (none, "not a checkpoint"),
        (wider, "another network"),
        (other, "was trained on"),
    ):
        more = (images, f"--ckpt_path={first}", f"--model.ensemble=['{path}']")
        done = segment("predict", *volumes(tmp_path / "out", Path("/gone"), *more))
        check(done, tmp_path / "out", f"{path}: ")
        assert why in done.errors[0]


MIXERS = "ndlightnet.nn.mixers"
# wrong options -> the one line that is printed
WRONG = {
    "--model.nett.depth=3": "--model.nett.depth: no such option; did you mean --model.net.depth?",
    "--model.depth=3": "--model.depth: no such option; did you mean --model.net.depth?",
    "--modle.lr=3": "--modle.lr: no such option; did you mean --model.lr?",
    "--model.net.patch=3": "model.net.patch: NDLightNet has no such argument; did you mean patch_size?",
    "--data.init_args.framess=3": "data.framess: VideoData has no such argument; did you mean frames?",
    "--data.frames=x": "data.frames=x: expected int",
    "--model.lr=fast": "model.lr=fast: expected float",
    "--trainer.max_epochs=many": "trainer.max_epochs=many: expected int or None",
    "--model.net.patch_size=[1,x]": "model.net.patch_size=[1, 'x']: expected int, Sequence[int] or None",
    "--model.net=ndlightnet.NDLightNett": "model.net=ndlightnet.NDLightNett: ndlightnet has no "
    "NDLightNett; did you mean NDLightNet?",
    "extra": "extra: expected options only, such as --config FILE",
}


@pytest.mark.parametrize("option", WRONG)
def test_a_wrong_option_is_one_line(classify, tmp_path, option):
    done = classify("fit", f"--trainer.default_root_dir={tmp_path}", option)
    assert (done.status, done.err) == (2, f"error: {WRONG[option]}\n")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "mixer, said",
    [
        (f"{MIXERS}.GLAX", f"mixer='{MIXERS}.GLAX': did you mean 'GLA'?"),
        (
            f"{{class_path: {MIXERS}.GLA, init_args: {{num_heads: 3}}}}",
            "mixer: GLA has no 'num_heads', did you mean 'heads'?",
        ),
        (f"{{class_path: {MIXERS}.GLA, init_args: {{heads: x}}}}", "model: wrong type of an arg"),
    ],
)
def test_a_wrong_mixer_is_one_line(classify, tmp_path, mixer, said):
    out = tmp_path / "out"
    done = classify("fit", f"--trainer.default_root_dir={out}", f"--model.net.mixer={mixer}")
    check(done, out, said)


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
