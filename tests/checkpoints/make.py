"""Makes the files of this folder: what earlier code saved, and later code must still load.

python tests/checkpoints/make.py    from the folder of the project

TASK.ckpt: a checkpoint of `fit`, two epochs on a tiny data set. modules.pt: weights of layers and
networks, random and none of them zero. outputs.pt: inputs, and what the code of then made of them.
The files here were made by commit b5e2068; to make them anew is to forget that code.
"""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from datetime import datetime
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import av
import nibabel
import numpy as np
import torch
import yaml
from torch import Tensor, nn

import ndlightnet.training
from ndlightnet.data.made.digits import make_moving_digits
from ndlightnet.data.series.hourly_series import Series, write_series
from ndlightnet.nn import MDTPE, MultiheadAttention, mixers

HERE = Path(__file__).parent
NET = {"embed_dim": 8, "depth": 1, "tpe_states": 2}
# of each kind of data: the task, the class of its data, the network and the arguments of both,
# and the shape of an input (a language model's are bytes, a forecaster's values and times)
KINDS: dict[str, tuple[str, str, str, dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "image": (
        "ImageTask",
        "ImageData",
        "ndlightnet.NDLightNet",
        {**NET, "dims": 2, "in_chans": 1, "num_classes": 3, "patch_size": 2},
        {"batch_size": 4, "train_limit": 8},
        (2, 1, 8, 6),
    ),
    "video": (
        "VideoTask",
        "VideoData",
        "ndlightnet.NDLightNet",
        {**NET, "dims": 3, "num_classes": 6, "patch_size": [2, 8, 8], "causal": True},
        {"frames": 2, "size": 16, "batch_size": 6, "clips": 1, "validation": 0, "workers": 0},
        (2, 3, 4, 16, 16),
    ),
    "volume": (
        "ImageTask",
        "VolumeFolders",
        "ndlightnet.NDLightNet",
        {**NET, "dims": 3, "in_chans": 1, "num_classes": 2, "patch_size": 2},
        {"size": [6, 5, 4], "batch_size": 4, "validation": 0.2, "train_limit": 8},
        (2, 1, 6, 5, 4),
    ),
    "signal": (
        "SignalTask",
        "SignalData",
        "ndlightnet.NDLightNet",
        {**NET, "dims": 1, "in_chans": 32, "num_classes": 3, "patch_size": 2},
        {"spectrum": [64, 32], "batch_size": 2, "workers": 0},
        (2, 32, 9),
    ),
    "segmentation": (
        "SegmentationTask",
        "VolumeData",
        "ndlightnet.NDLightUNet",
        {
            "dims": 3,
            "in_channels": 1,
            "out_channels": 2,
            "widths": [2, 4],
            "convs": [1, 1],
            "depths": [0, 1],
            "deep_supervision": True,
        },
        {"patch": [8, 8, 8], "batch_size": 2, "batches": 2, "workers": 0},
        (2, 1, 8, 6, 4),
    ),
    "text": (
        "TextTask",
        "TextData",
        "ndlightnet.NDLightNet",
        {**NET, "dims": 1, "vocab_size": 256, "causal": True},
        {"length": 16, "windows": 8, "batch_size": 4, "lengths": [16], "test_bytes": 32, "workers": 0},
        (2, 11),
    ),
    "forecast": (
        "ForecastTask",
        "SeriesData",
        "ndlightnet.models.Forecaster",
        {"in_chans": 2, "label_length": 24, "embed_dim": 8, "depth": 1},
        {"file": "hours.csv", "input_length": 24, "horizon": 6, "split": [49, 90, 120], "batch_size": 10, "workers": 0},
        (2, 24, 2),
    ),
}
DIM, SHAPE = 16, (2, 3, 5, 16)  # of the layers and their input
# the arguments of layers beside the width; not named here: two heads, if it has heads
ARGUMENTS: dict[str, dict[str, Any]] = {
    "S4": {"state": 8},
    "S5": {"state": 8},
    "RWKV4": {},
    "Identity": {},
    "Mamba": {"state": 4},
}


def named(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(import_module(module), name)


def network(kind: str) -> nn.Module:
    _, _, net, arguments, *_ = KINDS[kind]
    found: nn.Module = named(net)(**arguments)
    return found


def layer(name: str) -> nn.Module:
    if name == "MDTPE":
        return MDTPE(2, DIM, 4)
    if name == "MultiheadAttention":
        return MultiheadAttention(DIM, 2, batch_first=True)
    found: nn.Module = getattr(mixers, name)(DIM, **ARGUMENTS.get(name, {"heads": 2}))
    return found


LAYERS = (*mixers.__all__, "MDTPE", "MultiheadAttention")


def answers(net: nn.Module, x: Tensor, times: Tensor | None = None) -> list[Tensor]:
    """What a layer or network makes of x; a mixer in both its forms."""
    net = net.eval()
    with torch.no_grad():
        if isinstance(net, MultiheadAttention):
            x = x.flatten(1, 2)
            return [net(x, x, x, need_weights=False)[0]]
        if type(net).__name__ in mixers.__all__:
            return [net(x), net(x, causal=True)]
        if times is not None:
            return [net(x, times)]
        return [net(x)]


def write(kind: str, root: Path) -> None:
    """A tiny data set; one file for images (npz) and text, else a folder."""
    rng = np.random.default_rng(0)
    if kind == "video":
        make_moving_digits(root, 12, 6, frames=4, size=24, progress=False)
    elif kind == "text":
        root.write_bytes(rng.integers(0, 256, 1000, np.uint8).tobytes())
    elif kind == "image":
        arrays = {}
        for part, count in (("train", 10), ("test", 6)):
            arrays[f"{part}_images"] = rng.integers(0, 256, (count, 8, 8), np.uint8)
            arrays[f"{part}_labels"] = np.arange(count)[:, None] % 3
        np.savez(root, **arrays)
    elif kind == "forecast":
        root.mkdir()
        values = torch.from_numpy(rng.normal(size=(130, 2)))
        write_series(root / "hours.csv", Series(("A", "OT"), datetime(2020, 1, 1), values))
    elif kind == "signal":
        write_recordings(root)
    elif kind == "volume":
        for part, count in (("train", 5), ("test", 1)):
            for name, std in (("dark", 1.0), ("bright", 2.0)):
                (root / part / name).mkdir(parents=True)
                for number in range(count):
                    voxels = rng.normal(0, std, (6, 5, 4)).astype(np.float32)
                    save(root / part / name / f"{number}.nii.gz", voxels)
    else:
        write_decathlon(root)


def save(path: Path, voxels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), path)


def write_decathlon(root: Path) -> None:
    rng, pairs = np.random.default_rng(0), []
    for number in range(4):
        label = np.zeros((12, 10, 8), np.uint8)
        label[3:8, 2:7, 2:6] = 1
        image = (label * 100 + rng.normal(0, 20, label.shape)).astype(np.float32)
        pairs.append({"image": f"images/{number}.nii.gz", "label": f"labels/{number}.nii.gz"})
        save(root / pairs[-1]["image"], image)
        save(root / pairs[-1]["label"], label)
    listing = {
        "labels": {"0": "background", "1": "cube"},
        "modality": {"0": "CT"},
        "training": pairs[:-1],
        "test": pairs[-1:],
    }
    (root / "dataset.json").write_text(json.dumps(listing))


def write_recordings(root: Path) -> None:
    rng, index = np.random.default_rng(0), [(d, take) for take in range(7) for d in range(3)]
    signals = [rng.integers(-3000, 3000, rng.integers(300, 600), np.int16) for _ in index]
    root.mkdir()
    with av.open(str(root / "audio.flac"), "w") as file:
        stream = file.add_stream("flac", rate=8000)
        stream.layout, stream.format = "mono", "s16"
        samples = np.concatenate(signals)[None]
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.rate = 8000
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    digits, takes = (np.array(x, np.uint8) for x in zip(*index, strict=True))
    np.savez(root / "index.npz", offsets=np.cumsum([0, *map(len, signals)]), digit=digits, take=takes)


def config(kind: str, root: Path, out: Path) -> dict[str, Any]:
    _, data, net, net_arguments, data_arguments, _ = KINDS[kind]
    return {
        "seed_everything": 3,
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 2,
            "log_every_n_steps": 1,
            "default_root_dir": str(out),
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
        "model": {"lr": 1e-2, "net": {"class_path": net, "init_args": net_arguments}},
        "data": {"class_path": f"ndlightnet.training.{data}", "init_args": {"root": str(root), **data_arguments}},
    }


def fit(kind: str, folder: Path) -> Path:
    """The checkpoint."""
    root = folder / ("data.npz" if kind == "image" else "data")
    write(kind, root)
    (folder / "given.yaml").write_text(yaml.dump(config(kind, root, folder / "out")))
    task = getattr(ndlightnet.training, KINDS[kind][0])
    data = getattr(ndlightnet.training, KINDS[kind][1])
    sys.argv = ["task.py", "fit", "--config", str(folder / "given.yaml")]
    assert ndlightnet.training.run(task, data, Path("none")) == 0
    return folder / "out" / "checkpoints" / "last.ckpt"


def example(kind: str) -> tuple[Tensor, ...]:
    shape = KINDS[kind][-1]
    if kind == "text":
        return (torch.randint(256, shape),)
    if kind == "forecast":
        return torch.randn(shape), torch.randn(shape[0], shape[1] + 6, 4)
    return (torch.randn(shape),)


def rounding(net: nn.Module, inputs: tuple[Tensor, ...], found: list[Tensor]) -> float:
    """How far float32 is from float64, relative to the largest number."""
    exact = answers(deepcopy(net).double(), *(x.double() if x.is_floating_point() else x for x in inputs))
    return max(float((y - z).abs().max() / z.abs().max()) for y, z in zip(found, exact, strict=True))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    weights, outputs = {}, {}

    def keep(name: str, net: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found = answers(net, *inputs)
        outputs[name] = {"inputs": inputs, "outputs": found, "rounding": rounding(net, inputs, found)}

    for name in LAYERS:
        net = layer(name)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        weights[name] = net.state_dict()
        keep(name, net, (torch.randn(SHAPE),))
    torch.save(weights, HERE / "modules.pt")
    for kind in KINDS:
        with TemporaryDirectory() as folder:
            saved = torch.load(fit(kind, Path(folder)), weights_only=True)
        for state in saved["callbacks"].values():  # of folders that are gone
            state |= {key: "" for key, value in state.items() if isinstance(value, str)}
        torch.save(saved, HERE / f"{kind}.ckpt")
        net = network(kind)
        net.load_state_dict({key[4:]: x for key, x in saved["state_dict"].items() if key.startswith("net.")})
        torch.manual_seed(1)
        keep(kind, net, example(kind))
    torch.save(outputs, HERE / "outputs.pt")
    for name, kept in outputs.items():
        print(f"{name:20} {kept['rounding']:.1e}")


if __name__ == "__main__":
    main()
