"""The command `export`: the network of a run as a file that runs without this library."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import yaml
from jsonargparse import ArgumentParser, auto_cli
from torch import Tensor, nn
from torch._inductor.exc import InductorError, InvalidCxxCompiler
from torch.export import Dim

from ndlightnet.data.errors import DataError, one_line, writable
from ndlightnet.models import NDLightNet, NDLightUNet
from ndlightnet.models.weights import load_weights, read_checkpoint
from ndlightnet.training.core.checkpoints import network_difference
from ndlightnet.training.core.options import CommandParser
from ndlightnet.training.core.runs import find_checkpoint, saved_config

Run = Callable[[Tensor], Tensor]
LARGEST = 2**30  # bytes of weights: an ONNX file has at most 2**31 bytes
MARGIN = 4  # a file adds in another order: its error may be some times that of the network
SIZES = ((5, 6, 7), (4, 5, 3), (9, 8, 6))  # tokens along up to three axes: traced, and two others
LENGTHS = (40, 33, 90)  # the same for one axis: of less than a chunk of 64 tokens, and of more


def export(arguments: list[str]) -> int:
    """Run the command `export`. Returns the exit status: 0, or 1 after an error or a difference."""
    try:
        auto_cli(write_network, args=arguments, parser_class=CommandParser, prog="ndlightnet export")
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def write_network(run: str, *, to: Literal["onnx", "pt2"]) -> None:
    """Write a run's network to RUN/model.onnx or RUN/model.pt2.

    The file takes any batch and sizes. It is compared with the network at three sizes; a file that
    differs is not kept. `pt2` is a package of AOTInductor for this device.

    Args:
        run: folder of a run, or one of its checkpoints.
        to: the format.
    """
    net, ckpt = load_network(Path(run))
    folder = Path(run) if Path(run).is_dir() else ckpt.parent
    device = torch.device("cuda" if to == "pt2" and torch.cuda.is_available() else "cpu")
    net.to(device)
    print(f"{ckpt}: {type(net).__name__}, for {device.type}")
    # Large weights lie beside an ONNX file that holds their name: it is written with its own name.
    with writable(folder):
        drafts = TemporaryDirectory(prefix=".export", dir=folder)
    with drafts as place:
        draft = Path(place) / f"model.{to}"
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                (write_onnx if to == "onnx" else write_pt2)(net, draft)
                file: Run = load_onnx(draft) if to == "onnx" else load_pt2(draft)
        except ImportError as error:
            hint = "pip install onnx onnxscript onnxruntime " if to == "onnx" else ""
            raise DataError(f"--to {to}: {hint}({one_line(error)})") from error
        good = [_compare(net, file, at, batch) for at, batch in enumerate((2, 1, 3))]
        if not all(good):
            raise DataError(f"--to {to}: the file differs from the network, it is not kept")
        for written in sorted(Path(place).iterdir(), key=lambda written: written == draft):  # it comes last
            written.replace(folder / written.name)
    print(f"wrote {folder / draft.name}")


def load_network(run: Path) -> tuple[nn.Module, Path]:
    """Return the network of a run in eval mode, and the checkpoint: the one given, or a folder's
    best.ckpt or else last.ckpt. The run's config says what the network is."""
    ckpt, root = find_checkpoint(run)
    config = saved_config(root)
    try:
        saved, weights = read_checkpoint(ckpt)
    except ValueError as error:
        raise DataError(error) from error
    try:
        parser = ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(nn.Module, "net")
        net_config = {"net": yaml.safe_load(config.read_text())["model"]["net"]}
        net: nn.Module = parser.instantiate_classes(parser.parse_object(net_config)).net
        if difference := network_difference(net, saved):
            raise DataError(difference)
        load_weights(net, weights, ckpt)
    except Exception as error:  # classes may raise anything
        raise DataError(f"{config}: not the network of {ckpt} ({one_line(error)})") from error
    return net.eval(), ckpt


# -------------------------------------------------------------------------------------- inputs
def example(net: nn.Module, at: int, batch: int) -> Tensor:
    """Return a random input of size number `at` (0: the traced one)."""
    kind = next(net.parameters())
    if not isinstance(net, NDLightNet | NDLightUNet):
        raise DataError(f"{type(net).__name__}: expected NDLightNet or NDLightUNet")
    shape = (SIZES[at] * net.dims)[: net.dims]
    if isinstance(net, NDLightNet):
        shape = LENGTHS[at : at + 1] if net.dims == 1 else shape
        if net.vocab_size is not None:
            return torch.randint(net.vocab_size, (batch, *shape), device=kind.device)
        patch: Any = net.embed.patch
        channels = net.in_chans
    else:
        shape, channels = tuple(n - 2 for n in shape), net.in_channels
        patch = [math.prod(steps) for steps in zip(*net.strides, strict=True)]
    # no whole number of patches
    space = [n * step - (step > 1) for n, step in zip(shape, patch, strict=True)]
    return torch.randn(batch, channels, *space, dtype=kind.dtype, device=kind.device)


def _dynamic(x: Tensor) -> tuple[dict[int, Any]]:
    """Return what torch.export takes as any: the batch and all sizes but that of the channels."""
    first = 2 if x.is_floating_point() else 1
    return ({0: Dim.DYNAMIC, **dict.fromkeys(range(first, x.ndim), Dim.DYNAMIC)},)


# --------------------------------------------------------------------------------------- files
def write_onnx(net: nn.Module, path: Path) -> None:
    x = example(net, 0, 2)
    program = torch.onnx.export(
        net,
        (x,),
        dynamo=True,
        dynamic_shapes=_dynamic(x),
        input_names=["input"],
        output_names=["output"],
        verbose=False,
        optimize=False,  # it takes as long as all the rest, and runtimes optimise when they load
    )
    assert program is not None
    numbers = sum(p.numel() * p.element_size() for p in net.parameters())
    with writable(path):
        program.save(str(path), external_data=numbers > LARGEST)


def load_onnx(path: Path) -> Run:
    runtime: Any = import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (name,) = (one.name for one in session.get_inputs())
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def write_pt2(net: nn.Module, path: Path) -> None:
    x = example(net, 0, 2)
    program = torch.export.export(net, (x,), dynamic_shapes=_dynamic(x))
    try:
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    except InductorError as error:
        if not isinstance(error.inner_exception, InvalidCxxCompiler):
            raise
        raise DataError(f"--to pt2: needs a C++ compiler, such as g++ ({one_line(error)})") from error


def load_pt2(path: Path) -> Run:
    run: Run = torch._inductor.aoti_load_package(str(path))
    return run


@torch.no_grad()
def _compare(net: nn.Module, file: Run, at: int, batch: int) -> bool:
    """Print how far file and network are from the network in float64, and return whether the file
    is not much farther."""
    x = example(net, at, batch)
    exact = deepcopy(net).double()(x.double() if x.is_floating_point() else x)
    scale = exact.abs().max().item()
    error_of_net, error_of_file = ((y - exact).abs().max().item() for y in (net(x), file(x)))
    good = error_of_file <= MARGIN * error_of_net + 1e-6 * scale
    print(
        f"  {tuple(x.shape)}: largest error {error_of_file:.1e} (network {error_of_net:.1e}) of {scale:.1e}, "
        f"{'ok' if good else 'NOT EQUAL'}"
    )
    return good
