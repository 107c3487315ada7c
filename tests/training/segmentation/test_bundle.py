"""MONAI bundles: what MONAI makes of them is what `predict` writes, on any grid and channels."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser, ckpt_export, onnx_export, verify_net_in_out
from monai.bundle.properties import InferProperties, MetaProperties
from monai.bundle.utils import DEFAULT_METADATA
from monai.data import load_net_with_metadata

from ndlightnet.data.made.phantoms import LABELS
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.transforms import Intensity, Prepare
from ndlightnet.data.volume.volume import Volume
from ndlightnet.nn.mixers import WindowAttention
from ndlightnet.training import SegmentationTask, VolumeData
from ndlightnet.training.segmentation import bundle as bundles
from ndlightnet.training.segmentation.bundle_files import inference_of
from tests.training.conftest import UNET, last, options
from tests.training.conftest import launch as command_line
from tests.training.forked import run_forked

CT = {"low": -912, "high": 469, "mean": -164, "deviation": 355}
# left, back and head, 7 degrees about z, 1.5 x 2 x 2.5 mm
TURN = np.array([[-np.cos(0.12), np.sin(0.12), 0], [-np.sin(0.12), -np.cos(0.12), 0], [0, 0, 1]])
OBLIQUE = np.block([[TURN @ np.diag([1.5, 2.0, 2.5]), np.array([[30.0], [-20], [5]])], [0, 0, 0, 1]])


def launch(config: Path, command: str, *words: object, **values: object) -> list[str]:
    """The lines of errors of a command on a config that a training has left."""
    first = (SegmentationTask, VolumeData, config.read_text(), config.parent / "given", command)
    done = command_line(*first, *words, commands={"bundle": bundles.bundle}, **values)
    assert done.status == bool(done.errors)
    return done.errors


def train(segment, out: Path, scans: Path, **values: object) -> Path:
    """The config that a training of two steps leaves in `out`."""
    trainer = {"limit_train_batches": 2, "limit_val_batches": 0, "enable_progress_bar": False}
    segment("fit", out=out, root=scans, trainer=trainer, **values).well()
    return out / "config.yaml"


@pytest.fixture(scope="module")
def resampled(segment, phantoms, tmp_path_factory) -> Path:
    """The config of a training on phantoms, with all that changes a prediction."""
    folder = tmp_path_factory.mktemp("resampled")
    (folder / "scans").symlink_to(phantoms)
    model = {"window": [24, 20, 16], "overlap": 0.4, "mirror_axes": [1], "largest": True}
    data = {"spacing": [9, 7, 11], "intensities": [CT], "batch_size": 1}
    return train(segment, folder, folder / "scans", model=model, data=data)


@pytest.fixture(scope="module")
def channels(segment, tmp_path_factory) -> Path:
    """The config of a training on two of three channels, files of their own, on the scans' grids, with a mixer that
    has arguments."""
    folder = tmp_path_factory.mktemp("channels")
    rng = np.random.default_rng(0)

    def save(name: str, voxels: np.ndarray) -> None:
        (folder / "scans" / name).parent.mkdir(parents=True, exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(voxels, OBLIQUE), folder / "scans" / name)

    for number in range(3):
        label = np.zeros((13, 11, 9), np.uint8)
        label[3:9, 2 + number : 8, 2:6] = 1
        for channel in range(3):
            voxels = label * 60.0 * channel + rng.normal(0, 30, label.shape)
            place = "imagesTr" if number < 2 else "imagesTs"
            save(f"{place}/c{number}_000{channel}.nii.gz", voxels.astype(np.float32))
        if number < 2:
            save(f"labelsTr/c{number}.nii.gz", label)
    listing = {"channel_names": {"0": "CT", "1": "PET", "2": "T1"}, "labels": {"background": 0, "box": 1}}
    listing |= {"numTraining": 2, "file_ending": ".nii.gz"}
    (folder / "scans" / "dataset.json").write_text(json.dumps(listing))
    mixer = {"class_path": "ndlightnet.nn.mixers.WindowAttention", "init_args": {"window": [1, 2, 3]}}
    data = {"patch": [8, 8, 8], "channels": [2, 0], "intensities": [CT, {}, {}], "batch_size": 1}
    net = {"in_channels": 2, "out_channels": 2, "mixer": mixer}
    return train(segment, folder, folder / "scans", net=net, data=data)


def exported(config: Path, out: Path, *more: object) -> Path:
    assert launch(config, "bundle", "--out", out / "name", *more, ckpt=last(config.parent)) == []
    return out / "name"


def predicted(config: Path, out: Path, *more: object) -> Path:
    """The folder of what `predict` makes of `imagesTs`."""
    scans = config.parent / "scans" / "imagesTs"
    assert launch(config, "predict", *more, ckpt=last(config.parent), input=scans, out=out) == []
    return out / "predictions"


def parser_of(root: Path) -> ConfigParser:
    parser = ConfigParser()
    parser.read_config(root / "configs" / "inference.json")
    parser.read_meta(root / "configs" / "metadata.json")
    return parser


def run_evaluator(root: Path, scans: Path, out: Path) -> None:
    """What MONAI's evaluator does with a bundle, without pytorch-ignite."""
    parser = parser_of(root)
    parser.update({"bundle_root": str(root), "dataset_dir": str(scans), "output_dir": str(out)})
    network, net = (parser.get_parsed_content(key) for key in ("network", "network_def"))
    net.load_state_dict(torch.load(root / "models" / "model.pt", weights_only=True))
    inferer, after = (parser.get_parsed_content(key) for key in ("inferer", "postprocessing"))
    for item in parser.get_parsed_content("dataset"):
        with torch.no_grad():
            item["pred"] = inferer(item["image"][None], network.eval())[0]
        after(item)


def compare(ours: Path, theirs: Path) -> tuple[int, int]:
    """Voxels that have another label, and all."""
    a, b = nibabel.load(ours), nibabel.load(theirs)
    assert a.get_data_dtype() == b.get_data_dtype() == np.uint8
    np.testing.assert_allclose(b.affine, a.affine, atol=1e-4)
    first, second = np.asarray(a.dataobj), np.asarray(b.dataobj)
    assert first.shape == second.shape and len(np.unique(first)) > 1
    return int((first != second).sum()), first.size


@pytest.mark.slow
def test_resampled_windows_of_an_ensemble(resampled, tmp_path):
    """Both interpolate logits linearly, float32 here and float64 there: a label may change where the best two logits
    are equal to a part in 1e-5, which is rare."""
    second = tmp_path / "second.ckpt"
    saved = torch.load(last(resampled.parent), weights_only=True)
    noise = torch.Generator().manual_seed(1)
    for value in saved["state_dict"].values():
        value += 0.3 * torch.randn(value.shape, generator=noise)
    torch.save(saved, second)
    more = f"--model.ensemble=['{second}']"
    root, predictions = exported(resampled, tmp_path, more), predicted(resampled, tmp_path, more)
    run_evaluator(root, resampled.parent / "scans" / "imagesTs", tmp_path / "eval")
    ours, theirs = predictions / "phantom_003.nii.gz", tmp_path / "eval/phantom_003_seg.nii.gz"
    assert nibabel.aff2axcodes(nibabel.load(ours).affine) == ("L", "P", "S")
    differ, count = compare(ours, theirs)
    assert differ <= 1e-4 * count


def bundle_command(folder: Path, *words: str) -> None:
    """`python -m monai.bundle` in `folder`."""
    os.chdir(folder)
    sys.argv = ["monai.bundle", *words]
    runpy.run_module("monai.bundle", run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_monai_runs_it_from_anywhere(channels, tmp_path, fresh):
    """In a process of its own, also in one that has loaded nothing before, on the scans' own grids."""
    pytest.importorskip("ignite", reason="pytorch-ignite runs bundles")
    pytest.importorskip("fire", reason="the command line of monai.bundle")
    root, predictions = exported(channels, tmp_path), predicted(channels, tmp_path)
    config, scans = root / "configs" / "inference.json", channels.parent / "scans" / "imagesTs"
    options = {"bundle_root": root, "config_file": config, "dataset_dir": scans}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    if fresh:
        subprocess.run([sys.executable, "-m", "monai.bundle", "run", *words], cwd=tmp_path, check=True)
    else:
        assert run_forked(tmp_path / "log", bundle_command, tmp_path, "run", *words) == [0]
    assert compare(predictions / "c2.nii.gz", root / "eval" / "c2_0000_seg.nii.gz") == (0, 13 * 11 * 9)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["ts", pytest.param("onnx", marks=pytest.mark.exhaustive)])
def test_monai_exports_it(to, channels, tmp_path):
    """TorchScript from a trace: MONAI scripts no class of ours."""
    root, path, shape = exported(channels, tmp_path), tmp_path / f"model.{to}", [1, 2, 13, 11, 9]
    files = {"ckpt_file": root / "models" / "model.pt", "config_file": root / "configs" / "inference.json"}
    arguments = {name: str(file) for name, file in {**files, "bundle_root": root, "filepath": path}.items()}
    write = {"ts": ckpt_export, "onnx": onnx_export}[to]
    write(net_id="network_def", use_trace=True, input_shape=shape, **arguments)
    net = parser_of(root).get_parsed_content("network_def").eval()
    net.load_state_dict(torch.load(files["ckpt_file"], weights_only=True))
    x = torch.rand(shape)
    with torch.no_grad():
        expected = net(x)
    if to == "ts":
        traced, meta, _ = load_net_with_metadata(str(path))
        y = traced(x)
        assert meta["network_data_format"]["outputs"]["pred"]["num_channels"] == 2 == y.shape[1]
    else:
        session = pytest.importorskip("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
        y = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    # roundings of 6e-8 that a few hundred operations grow
    assert (y - expected).abs().max() < 2e-5 * (1 + expected.abs().max())


@pytest.mark.parametrize("config", ["resampled", "channels"])
def test_monai_knows_what_is_in_it(config, request, tmp_path):
    """What it asks of a bundle, the network's shapes, the keys of the specification, and the weights."""
    path = request.getfixturevalue(config)
    root = exported(path, tmp_path)
    parser = parser_of(root)
    saved = torch.load(last(path.parent), weights_only=True)["state_dict"]
    weights = torch.load(root / "models" / "model.pt", weights_only=True)
    assert weights and all(torch.equal(w, saved[f"net.{name}"]) for name, w in weights.items())
    required = [one for one in {**InferProperties, **MetaProperties}.values() if one["required"]]
    assert required and [one["id"] for one in required if one["id"] not in parser] == []
    metadata, inference = (str(root / "configs" / f"{name}.json") for name in ("metadata", "inference"))
    verify_net_in_out("network_def", meta_file=metadata, config_file=inference, device="cpu", any=9)
    meta = json.loads(Path(metadata).read_text())
    assert set(DEFAULT_METADATA) <= set(meta) and meta["name"] == "name"
    image, pred = (meta["network_data_format"][k][n] for k, n in (("inputs", "image"), ("outputs", "pred")))
    keys = {"type", "format", "num_channels", "spatial_shape", "dtype", "value_range", "is_patch_data", "channel_def"}
    assert keys <= set(pred) and {*keys, "modality"} <= set(image)
    if config == "channels":
        assert image["channel_def"] == {"0": "T1", "1": "CT"} and image["value_range"] == []
        assert image["spatial_shape"] == ["*", "*", "*"] and image["is_patch_data"] is False
        assert pred["channel_def"] == {"0": "background", "1": "box"}
        modules = parser.get_parsed_content("network_def").modules()
        assert [m.window for m in modules if isinstance(m, WindowAttention)] == [(1, 2, 3)]
        readme = (root / "docs" / "README.md").read_text()
        assert readme.startswith("# name\n") and "- 1: box" in readme and "CT, PET, T1" in readme
    else:
        assert image["value_range"] == pytest.approx([(-912 + 164) / 355, (469 + 164) / 355])
        assert image["spatial_shape"] == [24, 20, 16] and image["format"] == "hounsfield"
        assert list(pred["channel_def"].values()) == list(LABELS) and pred["num_channels"] == 7
    paths = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    assert paths == ["configs/inference.json", "configs/metadata.json", "docs/README.md", "models/model.pt"]


@pytest.mark.parametrize(("spacing", "chosen"), [(None, [1]), ([2.0, 1.5, 3.0], None)])
def test_preprocessing_is_prepare(spacing, chosen, tmp_path):
    """MONAI's reader and transforms give what Prepare does, of a file whose fourth axis holds the channels, in
    turned axes."""
    voxels = np.random.default_rng(0).normal(0, 300, (9, 7, 5, 2)).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(voxels, OBLIQUE), tmp_path / "scan.nii.gz")
    scales = [Intensity(-300, 200, 10, 90), Intensity()]
    data = VolumeData("none", [8, 8, 8], scales, chosen, spacing)
    data.set_names({"labels": ["background", "x"], "modalities": ["CT", "T1"]})
    config = inference_of({}, SegmentationTask(torch.nn.Identity()), data, "bf16-mixed")
    assert config["evaluator"]["amp_kwargs"] == {"dtype": "$torch.bfloat16"}
    transform = ConfigParser(json.loads(json.dumps(config))).get_parsed_content("preprocessing")
    image = transform({"image": [str(tmp_path / "scan.nii.gz")]})["image"]
    case = Volume.read(Case("scan", (tmp_path / "scan.nii.gz",), None))
    expected = Prepare(scales, spacing, chosen)(case)["image"]
    assert image.shape == expected.shape and image.dtype == expected.dtype == torch.float32
    # of clipped values; the affine is float32 in the file
    torch.testing.assert_close(image.as_tensor(), expected.as_tensor(), rtol=0, atol=1e-5)
    torch.testing.assert_close(image.affine, expected.affine, rtol=0, atol=1e-6)


def test_names_of_the_data_are_never_evaluated(channels, tmp_path):
    """MONAI evaluates $, and replaces % by what a file holds and @ by what it refers to."""
    touched, secret = tmp_path / "touched", tmp_path / "secret.json"
    secret.write_text(json.dumps({"a": f"$open({str(touched)!r}, 'w')"}))
    ckpt, root = tmp_path / "given.ckpt", tmp_path / "bundle"
    saved = torch.load(last(channels.parent), weights_only=True)
    label, *texts = f"$open({str(touched)!r}, 'w')", f"%{secret}", "@bundle_root", "\x1b[31m%#@##"
    torch.save({**saved, "names": {"labels": ["$1/0", label], "modalities": texts}}, ckpt)
    assert launch(channels, "bundle", "--out", root, ckpt=ckpt) == []
    for file in ("metadata", "inference"):
        parser = ConfigParser()
        parser.read_meta(str(root / "configs" / "metadata.json"))
        parser.read_config(str(root / "configs" / f"{file}.json"))
        parser.parse()
        formats = parser.get_parsed_content("_meta_")["network_data_format"]
        labels = formats["outputs"]["pred"]["channel_def"]
        assert labels == {"0": "\uff041/0", "1": label.replace("$", "\uff04")}
        # of channels 2 and 0; MONAI writes :: for #
        assert list(formats["inputs"]["image"]["channel_def"].values()) == [
            "\\x1b[31m\uff05::\uff20::::",
            f"\uff05{secret}",
        ]
    assert not touched.exists()
    text = (root / "docs" / "README.md").read_text()
    assert not set("$@%\x1b") & set(text) and "\uff04" in text


@pytest.mark.parametrize(
    "option, words",
    [
        ("--ckpt_path=DIR/gone", "DIR/gone: no such checkpoint"),
        ("--model.ensemble=['DIR/gone']", "DIR/gone: no such checkpoint"),
        ("--model.net.init_args.widths=[4,16]", "CKPT: the checkpoint of another"),
        ("--data.init_args.channels=[0]", "model.net: in_channels=2, expected 1 for"),
        ("--data.init_args.channels=[5,0]", "data.channels: [5, 0], expected some of 0 to 2"),
    ],
)
def test_what_does_not_fit_is_one_line(channels, tmp_path, option, words):
    out, ckpt = tmp_path / "bundles" / "name", last(channels.parent)
    option, words = (text.replace("DIR", str(tmp_path)).replace("CKPT", str(ckpt)) for text in (option, words))
    (error,) = launch(channels, "bundle", f"--ckpt_path={ckpt}", "--out", out, option)
    assert error.startswith(f"error: {words}") and not out.parent.exists()


@pytest.mark.slow
def test_nothing_is_written_over_or_half(channels, tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("")

    def error(name: str) -> str:
        (line,) = launch(channels, "bundle", "--out", tmp_path / name, ckpt=last(channels.parent))
        return line.removeprefix(f"error: {tmp_path / name}: ").removeprefix("error: ")

    for name in ("old", "file"):
        assert error(name) == "is there already, expected a new or an empty folder"
    assert error("file/name").startswith("cannot be written")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(bundles.torch, "save", full)
        assert error("new") == "cannot be written (No space left on device)"
    with monkeypatch.context() as patch:
        patch.setattr(bundles, "locate", lambda _: None)  # a class that is nowhere to be imported
        assert error("new").startswith("model.net: ndlightnet.NDLightUNet cannot be built from a MONAI config")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "mine.txt", "old"]


@pytest.mark.parametrize(
    "mixer",
    [
        None,
        "GLA",
        "ndlightnet.nn.mixers.published_mixer",
        {"class_path": "ndlightnet.nn.mixers.GLA", "init_args": {"scan": "axes"}},
        ["GLA", "ndlightnet.nn.mixers.S5", {"class_path": "ndlightnet.nn.mixers.Identity"}],
    ],
)
def test_monai_builds_the_same_network(mixer, tmp_path):
    """The default is a class. People write a name, a dotted name of a class or a function, a class with arguments,
    or a list of these."""
    (tmp_path / "plan.yaml").write_text(UNET)
    net = {"out_channels": 2, "depths": [1, 2]} | ({} if mixer is None else {"mixer": mixer})
    places = (f"--config={tmp_path}/plan.yaml", f"--ckpt_path={tmp_path}/best.ckpt", f"--out={tmp_path}/name")
    words = [*places, *options(root="none", out=tmp_path, net=net)]
    cli = bundles.BundleCLI(SegmentationTask, VolumeData, args=words, run=False)
    names = {"labels": ["background", "x"], "modalities": ["CT"]}
    torch.save({"state_dict": cli.model.state_dict(), "names": names}, tmp_path / "best.ckpt")
    definition, weights = bundles._network(cli, [str(tmp_path / "best.ckpt")])
    net = ConfigParser({"net": json.loads(json.dumps(definition))}).get_parsed_content("net")
    net.eval().load_state_dict(weights)
    assert net.config == cli.model.net.config
    x = torch.randn(1, 1, 8, 8, 8)
    assert torch.equal(net(x), cli.model.net.eval()(x))


def test_a_wrong_option_is_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        bundles.bundle(["--model.net=ndlightnet.NDLightUNet", "--outt=bundles/name"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "--outt" in line
