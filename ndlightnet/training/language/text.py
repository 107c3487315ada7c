"""Language models of bytes: trained at one length and tested at others, and as streams."""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from ndlightnet.data.errors import DataError, whole_file
from ndlightnet.data.text import RandomWindows, Windows, read_bytes, split
from ndlightnet.data.visits import Visits
from ndlightnet.training.core.loading import training_loader
from ndlightnet.training.core.measures import MeasuredTask
from ndlightnet.training.core.report import COLORS, plain_text, write_json

BYTES = 256  # words of the vocabulary
SINGLE = 64  # bytes that a stream is given one at a time in the end
AGREE = 0.01  # bits per byte: bf16 rounds a logit of 16 by up to 1/16, and the mean by far less


class TextData(L.LightningDataModule):
    """A file of bytes, plain, .gz or .xz: its first part to train, the next to validate, the last
    to test.

    Args:
        root: the file.
        fractions: shares of it to train, to validate (may be 0) and to test.
        length: bytes to predict in a training window, which holds one byte more.
        windows: training windows in an epoch, at random places.
        batch_size: training windows in a batch.
        lengths: of the windows that the test text is cut into; `length` is always one of them.
        test_bytes: of the test text at most so many are predicted, the same ones for every length:
            as many as fill windows of all of them.
        workers: processes that prepare batches.
    """

    def __init__(
        self,
        root: str,
        fractions: tuple[float, float, float] = (0.9, 0.05, 0.05),
        length: int = 2048,
        windows: int = 8192,
        batch_size: int = 32,
        lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768, 65536, 131072),
        test_bytes: int = 2**20,
        workers: int = 2,
    ) -> None:
        super().__init__()
        self.root, self.fractions, self.length = Path(root), fractions, length
        self.windows, self.batch_size, self.workers = windows, batch_size, workers
        self.lengths, self.test_bytes = sorted({length, *lengths}), test_bytes
        self.parts: tuple[Tensor, ...] = ()

    def setup(self, stage: str) -> None:
        if min(self.length, self.windows, self.batch_size, *self.lengths) < 1:
            raise DataError(
                f"length={self.length}, windows={self.windows}, batch_size={self.batch_size}, "
                f"lengths={self.lengths}: expected 1 or more of all"
            )
        self.seed = torch.initial_seed()
        self.parts = self.parts or split(read_bytes(self.root), self.fractions)
        train, val, test = self.parts
        for part, what in ((train, "train"), (val, "validate")):
            if len(part) <= self.length and (len(part) or what == "train"):
                raise DataError(
                    f"{self.root}: {len(part)} bytes to {what} on: expected length + 1 = "
                    f"{self.length + 1} or more"
                )
        whole = math.lcm(*self.lengths)
        self.tested = max(0, min(self.test_bytes, len(test) - 1)) // whole * whole
        if not self.tested:
            raise DataError(
                f"{self.root}: {len(test)} bytes to test on, test_bytes={self.test_bytes}: "
                f"expected more than {whole} for windows of lengths={self.lengths}"
            )

    @property
    def test_text(self) -> Tensor:
        """(bytes,) uint8: all that is held out, from where the test begins."""
        return self.parts[2]

    def train_dataloader(self) -> Any:
        windows = Visits(RandomWindows(self.parts[0], self.length, self.windows), self.seed)
        return training_loader(windows, self.windows, self.batch_size, self.workers)

    def val_dataloader(self) -> Any:
        windows = Windows(self.parts[1], self.length)
        return DataLoader(windows, batch_size=self.batch_size) if len(windows) else []

    def test_dataloader(self) -> Any:
        """One for each length; a batch of any of them is as many bytes as one longest window."""
        text, longest = self.test_text[: self.tested + 1], self.lengths[-1]
        return [DataLoader(Windows(text, n), batch_size=longest // n) for n in self.lengths]

    def names(self) -> dict[str, list[str]]:
        return {}

    def set_names(self, names: dict[str, list[str]]) -> None:
        """Bytes have no names."""


def surprise(predict: Callable[[Tensor], Tensor], windows: Tensor) -> Tensor:
    """What every byte but the first costs: windows (batch, length + 1) uint8 -> (batch, length)
    float32, nats. predict: bytes (batch, length) int64 -> logits (batch, length, 256)."""
    windows = windows.long()
    logits, targets = predict(windows[:, :-1]).float(), windows[:, 1:]
    each = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return each.view(targets.shape)


def octaves(length: int, first: int) -> list[tuple[int, int]]:
    """Positions 0 to `first`, then twice as far each time, up to `length`: (start, end) of each."""
    ends = [0, min(first, length)]
    while ends[-1] < length:
        ends.append(min(2 * ends[-1], length))
    return list(pairwise(ends))


def means(bits: dict[int, Tensor], lengths: Sequence[int], trained: int) -> dict[str, Any]:
    """Means of the bits of the same bytes (bytes,) in windows of each length that was measured: all
    of them, and by position in the longest windows. There beside them what the same bytes cost in
    windows of the training length: other positions are other text."""
    at = {n: float(bits[n].double().mean()) if n in bits else None for n in lengths}
    longest = max(bits, default=0)

    def by_position(length: int) -> dict[str, float]:
        each = bits[length].double().view(-1, longest)
        return {f"{a}-{b}": float(each[:, a:b].mean()) for a, b in octaves(longest, trained)}

    return {
        "bits_per_byte": at[trained],
        "bits_per_byte_at": at,
        "bits_per_byte_by_position": by_position(longest) if longest else {},
        "same_bytes_at_training_length": by_position(trained) if trained in bits else {},
    }


@torch.no_grad()
def decode(net: Any, text: Tensor, piece: int) -> dict[str, Any]:
    """The text (bytes + 1,) uint8 by a stream of `net`, in pieces of 1 byte, then of `piece`, then
    of 1 again, beside the network on all of it at once: bits per byte of both.

    state_bytes and, on CUDA, memory_allocated: after the first byte and after the last.
    """
    try:
        stream = net.stream()
    except ValueError as error:  # of a mixer whose memory would grow
        return {"not_measured": str(error)}
    count = len(text) - 1
    pieces, rest = divmod(max(0, count - 1 - SINGLE), piece)
    sizes = [1, *[piece] * pieces, *[rest] * (rest > 0)]
    sizes += [1] * (count - sum(sizes))
    streamed, start = 0.0, 0
    state: list[int] = []
    memory: list[int] = []
    for length in sizes:
        part = text[None, start : start + length + 1]
        streamed += float(surprise(stream, part).sum()) / count / math.log(2)
        start += length
        if start in (1, count):
            leaves = [x for x in tree_leaves(stream.state) if isinstance(x, Tensor)]
            state.append(sum(x.numel() * x.element_size() for x in leaves))
            memory += [torch.cuda.memory_allocated(text.device)] if text.is_cuda else []
    found = {"bytes": count, "bits_per_byte": streamed, "state_bytes": state,
             "memory_allocated": memory or None}  # fmt: skip
    try:
        at_once = float(surprise(net, text[None]).cpu().double().mean()) / math.log(2)
    except torch.OutOfMemoryError as error:
        return {**found, "bits_per_byte_at_once": None, "not_measured": str(error)}
    difference = abs(streamed - at_once)
    return {**found, "bits_per_byte_at_once": at_once, "difference": difference,
            "agrees": difference <= AGREE}  # fmt: skip


class TextTask(MeasuredTask):
    """Trains `net`, bytes (batch, length) -> logits (batch, length, 256) of the byte after each.

    `test` gives bits per byte for every length of the data: the same text in windows of that many
    bytes, each from an empty context, and by position in the longest windows. A length for which
    the memory of the device does not suffice is left out, with the reason.

    Args:
        net: the network, causal.
        lr, weight_decay: of AdamW, with warm-up and a cosine.
        decode_bytes: `test` also goes through so many bytes by `net.stream()`, in pieces and byte
            by byte, and compares that with the network on all of them at once; 0: it does not.
    """

    monitor = "val_score"  # the best checkpoint has the highest

    def __init__(
        self, net: nn.Module, lr: float = 1e-3, weight_decay: float = 0.1, decode_bytes: int = 0
    ) -> None:
        super().__init__()
        self.net, self.lr, self.weight_decay = net, lr, weight_decay
        self.decode_bytes = decode_bytes

    def setup(self, stage: str) -> None:
        for name, wanted in (("causal", True), ("vocab_size", BYTES), ("per_token", True)):
            here = getattr(self.net, name, wanted)
            if here != wanted:
                raise DataError(f"model.net: expected a network with {name}={wanted}, got {here}")
        held = len(self.data().test_text)
        if not 0 <= self.decode_bytes < held:
            raise DataError(
                f"model.decode_bytes={self.decode_bytes}: expected fewer than the {held} bytes "
                "that are held out to test, 0 for none"
            )

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = surprise(self.net, batch).mean()
        bits = loss.detach() / math.log(2)
        self.log("bits_per_byte", bits, prog_bar=True, batch_size=len(batch))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        windows, _index = batch
        bits = surprise(self.net, windows).mean() / math.log(2)
        how: dict[str, Any] = {"batch_size": len(windows), "sync_dist": True}
        self.log("val_bits_per_byte", bits, prog_bar=True, **how)
        self.log("val_score", -bits, **how)

    def on_test_epoch_start(self) -> None:
        # bits of the bytes of each window, by its length and number; why a length has none
        self.seen: dict[tuple[int, int], Tensor] = {}
        self.missing: dict[int, str] = {}

    def test_step(self, batch: tuple[Tensor, Tensor], _: int, dataloader_idx: int = 0) -> None:
        windows, numbers = batch
        length = windows.shape[1] - 1
        if length in self.missing:
            return
        try:
            bits = (surprise(self.net, windows) / math.log(2)).cpu()
        except torch.OutOfMemoryError as error:
            self.missing[length] = str(error)
            return
        self.seen |= {(length, n): row for n, row in zip(numbers.tolist(), bits, strict=True)}

    def on_test_epoch_end(self) -> None:
        data, missing, seen = self.data(), self.gathered(self.missing), self.gathered(self.seen)
        if not self.trainer.is_global_zero:
            return
        bits = {
            length: torch.cat([row for (n, _), row in seen.items() if n == length])
            for length in data.lengths
            if length not in missing
        }
        metrics = {
            **means(bits, data.lengths, data.length),
            "not_measured": missing,
            "train_length": data.length,
            "test_bytes": data.tested,
            **self.costs(),
        }
        shown = [f"{b.double().mean():.3f} at {length}" for length, b in bits.items()]
        self.summary = f"bits per byte {', '.join(shown) or 'not measured'}; see {self.out()}"
        if self.decode_bytes:
            plugin: Any = self.trainer.precision_plugin
            with plugin.forward_context():
                text = data.test_text[: self.decode_bytes + 1].to(self.device)
                metrics["decode"] = decode(self.net, text, data.length)
            self.summary += f"\ndecode: {metrics['decode']}"
        write_json(self.out() / "metrics.json", metrics)
        write_table(self.out() / "bits_per_byte.csv", metrics)
        draw({self.out().name: metrics}, self.out() / "bits_per_byte.png")


def write_table(path: Path, metrics: dict[str, Any]) -> None:
    """Lines of "window": all bytes of windows so long; of "position": those of the longest ones
    that lie between start and end."""
    lines = [
        ("window", 0, length, bits, "", metrics["not_measured"].get(length, ""))
        for length, bits in metrics["bits_per_byte_at"].items()
    ]
    for span, bits in metrics["bits_per_byte_by_position"].items():
        other = metrics["same_bytes_at_training_length"].get(span, "")
        lines.append(("position", *map(int, span.split("-")), bits, other, ""))
    with whole_file(path) as draft, open(draft, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["of", "start", "end", "bits_per_byte", "at_training_length", "note"])
        writer.writerows(lines)


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """The metrics.json of runs by name, in one picture: bits per byte over the length of windows,
    and what positions in the longest ones cost beyond the same bytes at the training length."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    colors = [color for color in COLORS if color != "#F0E442"]  # yellow does not show on white
    figure = Figure(figsize=(11, 4), layout="constrained", facecolor="white")
    left, right = panels = figure.subplots(1, 2)
    ticks: set[int] = set()
    for number, (name, metrics) in enumerate(runs.items()):
        at = {int(n): bits for n, bits in metrics["bits_per_byte_at"].items() if bits is not None}
        other = metrics["same_bytes_at_training_length"]
        beyond = {
            int(span.split("-")[1]): bits - other[span]
            for span, bits in metrics["bits_per_byte_by_position"].items()
            if span in other
        }
        style: dict[str, Any] = {
            "color": colors[number % len(colors)], "marker": "os^Dv"[number % 5], "markersize": 5,
            "linestyle": ("-", "--", ":")[number // len(colors) % 3], "linewidth": 2,
        }  # fmt: skip
        left.plot(list(at), list(at.values()), label=name, **style)
        right.plot(list(beyond), list(beyond.values()), **style)
        ticks |= set(at) | set(beyond)
    for axes in panels:
        for trained in {metrics["train_length"] for metrics in runs.values()}:
            axes.axvline(trained, color="#777777", linestyle="--", linewidth=1, zorder=0)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: short(int(n))))
        axes.grid(color="#DDDDDD", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    right.axhline(0, color="#777777", linewidth=1, zorder=0)
    left.set(title="windows from an empty context", ylabel="bits per byte",
             xlabel="bytes in a window (dashed: in training)")  # fmt: skip
    right.set(title="the longest windows by position", xlabel="octaves of positions, by their end",
              ylabel="less the same bytes at training length")  # fmt: skip
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9
    )
    plain_text(figure)
    with whole_file(path) as draft:
        figure.savefig(draft, dpi=130, format="png")


def short(n: int) -> str:
    return f"{n >> 10}k" if n >= 1024 and n % 1024 == 0 else str(n)


def curves(arguments: Sequence[str]) -> int:
    """The command `curves`: one picture of several runs. Returns the exit status."""
    parser = argparse.ArgumentParser("text_lm.py curves", description="One picture of all runs.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders with a metrics.json of `test`")
    parser.add_argument("--out", type=Path, default=Path("runs/curves.png"))
    options = parser.parse_args(arguments)
    names = [run.name for run in options.runs]
    if len(set(names)) < len(names):
        names = list(map(str, options.runs))
    try:
        draw(dict(zip(names, map(read_metrics, options.runs), strict=True)), options.out)
    except DataError as error:
        parser.exit(1, f"error: {error}\n")
    print(options.out)
    return 0


def read_metrics(folder: Path) -> dict[str, Any]:
    """DataError unless there is the metrics.json of a language model."""
    path = folder / "metrics.json"
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        metrics: dict[str, Any] = json.loads(path.read_text())
        metrics["bits_per_byte_at"], metrics["same_bytes_at_training_length"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not what the test of a language model writes") from error
    return metrics
