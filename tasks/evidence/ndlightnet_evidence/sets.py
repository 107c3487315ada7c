"""What a small network is trained and tested on: images or volumes, bytes of text.

The data are read once, lie on the card, and serve all runs. The batches of a seed are the same for
every network: their order and augmentation follow from the seed alone.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ndlightnet.data.image.image_sets import ImageSet
from ndlightnet.data.sampling import mixed
from ndlightnet.training import ImageData, TextData
from ndlightnet.training.classification.scores import scores
from ndlightnet.training.language.measures import token_nll
from ndlightnet_evidence import runner
from ndlightnet_evidence.cuda_graphs import Replay
from ndlightnet_evidence.device_memory import seconds
from ndlightnet_evidence.tables import Run

EVALUATION = 200  # images at a time
TIMED = 20  # steps
TIMED_TESTS = 5


def bfloat16(device: torch.device) -> torch.autocast:
    """Return the context in which a network on a card computes in bfloat16."""
    kind = device.type
    return torch.autocast(kind, torch.bfloat16, kind == "cuda", cache_enabled=False)


def logits(net: nn.Module, x: Tensor) -> Tensor:
    """Return logits in float32, on a card computed in bfloat16."""
    with bfloat16(x.device):
        out: Tensor = net(x)
    return out.float()


class Samples(ABC):
    """Data with their loss and test. steps: those of a training, as the config says. smoothing: of
    the labels in the cross-entropy of a classification."""

    measures: tuple[str, ...]  # the first one is shown and drawn
    steps: int
    smoothing = 0.1

    @abstractmethod
    def batches(self, seed: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield the inputs of `loss` for each step of a training."""

    @abstractmethod
    def loss(self, net: nn.Module, *batch: Tensor) -> Tensor:
        """Return the loss of a batch, to be captured in a graph."""

    def validate(self, net: nn.Module) -> Run | None:
        """Measure a network on a held-out part of the training data; None without such a part."""
        return None

    @abstractmethod
    def test(self, net: nn.Module, timed: bool) -> Run:
        """Test a network; return its measures, if timed with the time of a batch."""


class Images(Samples):
    """Grey images or volumes of one size (ImageData)."""

    def __init__(self, data: ImageData, epochs: int) -> None:
        data.setup("fit")
        self.data, self.device = data, runner.device()
        self.measures = ("auc", "top1") if len(data.classes) == 2 else ("top1",)
        train, test = data.train_set, data.test_set
        self.images, self.labels = train.images.to(self.device), train.labels.to(self.device)
        self.test_images, self.test_labels = test.images[:, None].to(self.device), test.labels
        # the loader's batches tell the numbers of the images; the images themselves are here
        nothing = train.images.new_empty(len(train), *[0] * (train.images.ndim - 1))
        data.train_set = ImageSet(nothing, train.labels)
        self.steps = epochs * len(data.train_dataloader())
        self.schedule = lru_cache(2)(self._schedule)

    def _schedule(self, seed: int, steps: int) -> list[Any]:
        """Return the numbers of the images of each step (steps, batch), and how they are moved."""
        self.data.seed = seed
        loader = self.data.train_dataloader()

        def epochs() -> Iterator[Any]:
            for epoch in count():
                loader.set_epoch(epoch)
                yield from loader

        columns = zip(*((numbers, *moves) for _, _, numbers, *moves in islice(epochs(), steps)), strict=True)
        return [torch.stack(c).to(self.device) if isinstance(c[0], Tensor) else c for c in columns]

    def batches(self, seed: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
        for numbers, *moves in zip(*self.schedule(seed, steps), strict=True):
            images = self.images.index_select(0, numbers)[:, None]
            batch = (images, self.labels.index_select(0, numbers), numbers, *moves)
            images, labels, _ = self.data.on_after_batch_transfer(batch, 0)
            yield images, labels

    def loss(self, net: nn.Module, *batch: Tensor) -> Tensor:
        images, labels = batch
        return cross_entropy(logits(net, images), labels, label_smoothing=self.smoothing)

    def test(self, net: nn.Module, timed: bool) -> Run:
        def normalised(x: Tensor) -> Tensor:
            return (x.float() - self.data.mean) / self.data.std

        probs, latency = classified(net, normalised, self.test_images, EVALUATION, TIMED_TESTS * timed)
        return {**scores(probs, self.test_labels, self.data.classes), "latency_ms": latency}


@torch.no_grad()
def classified(
    net: nn.Module, prepare: Callable[[Tensor], Tensor], images: Tensor, size: int, timed: int
) -> tuple[Tensor, float | None]:
    """Return the probabilities (n, classes) of images, on the CPU, and the median milliseconds of
    `timed` batches of `size`; None if timed is 0."""
    replay = Replay(lambda x: logits(net, prepare(x)).softmax(-1), images[:size].clone())
    times = [seconds(partial(replay, images[:size])) for _ in range(timed)]
    probs = [replay(batch)[: len(batch)].clone() for batch in images.split(size)]
    return torch.cat(probs).cpu(), 1e3 * statistics.median(times) if times else None


class Text(Samples):
    """Bytes of a text (TextData), tested in windows of several lengths."""

    def __init__(self, data: TextData, epochs: int) -> None:
        data.setup("fit")
        self.data, self.device = data, runner.device()
        self.steps = epochs * max(1, data.windows // data.batch_size)
        self.text = data.splits[0].to(self.device)
        self.test_text = data.test_text[: data.tested + 1].to(self.device)
        self.measures = ("bits_per_byte", *(f"bits_{n}" for n in data.lengths))

    def batches(self, seed: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield windows as RandomWindows and SeededSamples do: every epoch has one from each of `windows`
        equal parts of the text, in random order."""
        data, numbers, starts = self.data, torch.arange(self.data.windows), []
        positions = len(self.text) - data.length
        low, high = numbers * positions // data.windows, (numbers + 1) * positions // data.windows
        batch = min(data.batch_size, data.windows)
        rng = torch.Generator().manual_seed(mixed(seed))
        for _ in range(0, steps * batch, data.windows // batch * batch):
            order = torch.randperm(data.windows, generator=rng)
            first = low + (torch.rand(data.windows, generator=rng) * (high - low)).long()
            starts.append(first[order][: data.windows // batch * batch])
        window = torch.arange(data.length + 1, device=self.device)
        for first in torch.cat(starts).to(self.device).split(batch)[:steps]:
            yield (self.text[first[:, None] + window],)

    def loss(self, net: nn.Module, *batch: Tensor) -> Tensor:
        return token_nll(partial(logits, net), *batch).mean()

    @torch.no_grad()
    def test(self, net: nn.Module, timed: bool) -> Run:
        longest, bits = self.data.lengths[-1], {}
        for length in self.data.lengths:
            windows = self.test_text.unfold(0, length + 1, length)
            try:
                nats = sum(token_nll(partial(logits, net), x).double().sum() for x in windows.split(longest // length))
            except torch.OutOfMemoryError:
                continue
            bits[f"bits_{length}"] = float(nats) / self.data.tested / math.log(2)
        return {"bits_per_byte": bits.get(f"bits_{self.data.length}"), **bits}
