"""What a small network is trained and tested on: images or volumes, videos, bytes of text.

The data are read once, lie on the card, and serve all runs. The batches of a seed are the same for
every network: their order and augmentation follow from the seed alone.
"""

from __future__ import annotations

import math
import os
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ndlightnet.data.images import ImageSet
from ndlightnet.data.visits import Visits, mixed
from ndlightnet.inference import predict_clips
from ndlightnet.training import ImageData, TextData, VideoData
from ndlightnet.training.classification.scores import scores
from ndlightnet.training.core.data_module import training_loader
from ndlightnet.training.language.measures import token_nll
from ndlightnet_evidence import runner
from ndlightnet_evidence.graphs import Replay
from ndlightnet_evidence.turns import AHEAD, DONE, Work, seconds

EVALUATION = 200  # images at a time
TIMED = 20  # steps
TIMED_TESTS = 5


def bfloat16(device: torch.device) -> torch.autocast:
    """Return the context in which a network on a card computes in bfloat16."""
    kind = device.type
    return torch.autocast(kind, torch.bfloat16, kind == "cuda", cache_enabled=False)


def answer(net: nn.Module, x: Tensor) -> Tensor:
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

    def validate(self, net: nn.Module) -> Work:
        """Measure a network on a held-out part of the training data in turns; return its measures,
        or None without such a part."""
        return None
        yield  # a generator, as those that measure something

    @abstractmethod
    def test(self, net: nn.Module, timed: bool) -> Work:
        """Test a network in turns; return its measures. timed: nothing else may run, and the time
        of a batch is among them."""


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

        found = [(numbers, *moves) for _, _, numbers, *moves in islice(epochs(), steps)]
        columns = zip(*found, strict=True)
        return [torch.stack(c).to(self.device) if isinstance(c[0], Tensor) else c for c in columns]

    def batches(self, seed: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
        for numbers, *moves in zip(*self.schedule(seed, steps), strict=True):
            images = self.images.index_select(0, numbers)[:, None]
            batch = (images, self.labels.index_select(0, numbers), numbers, *moves)
            images, labels, _ = self.data.on_after_batch_transfer(batch, 0)
            yield images, labels

    def loss(self, net: nn.Module, *batch: Tensor) -> Tensor:
        images, labels = batch
        return cross_entropy(answer(net, images), labels, label_smoothing=self.smoothing)

    def test(self, net: nn.Module, timed: bool) -> Work:
        def normalised(x: Tensor) -> Tensor:
            return (x.float() - self.data.mean) / self.data.std

        images = self.test_images
        found = yield from classified(net, normalised, images, EVALUATION, TIMED_TESTS * timed)
        probabilities, latency = found
        result = scores(probabilities, self.test_labels, self.data.classes)
        return {**result, "latency_ms": latency}


@torch.no_grad()
def classified(net: nn.Module, prepare: Callable[[Tensor], Tensor], images: Tensor, size: int, timed: int) -> Work:
    """Return the probabilities (n, classes) of images, on the CPU, and the median milliseconds of
    `timed` batches of `size`; None if timed is 0."""
    replay = Replay(lambda x: answer(net, prepare(x)).softmax(-1), images[:size].clone())
    times = [seconds(partial(replay, images[:size])) for _ in range(timed)]
    found = []
    for part in images.split(size):
        found.append(replay(part)[: len(part)].clone())
        yield AHEAD
    yield DONE
    return torch.cat(found).cpu(), 1e3 * statistics.median(times) if times else None


class Videos(Samples):
    """Videos, decoded once (VideoData). The clips of a seed are made once, by other processes, and
    stay on the card as bfloat16, in which the network reads them."""

    measures = ("top1", "auc")

    def __init__(self, data: VideoData, epochs: int) -> None:
        for stage in ("fit", "test"):
            data.setup(stage)
        if data.pixels != "rgb":
            raise ValueError(f"data.pixels: {data.pixels}, expected rgb")
        self.data, self.device = data, runner.device()
        self.count = data.repeats * len(data.train_set)
        self.steps = epochs * max(1, self.count // data.batch_size)
        found = [data.test_set[i] for i in range(len(data.test_set))]
        self.test_clips = torch.stack([self._there(item[0]) for item in found])
        self.test_labels = torch.tensor([item[1] for item in found])
        self.clips = lru_cache(2)(lambda seed: Clips(self, seed))

    def _there(self, clips: Tensor) -> Tensor:
        kind = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return clips.to(self.device, non_blocking=True).to(kind)

    def batches(self, seed: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
        batch = self.clips(seed).batch
        batch(min(TIMED, steps - 1))  # those of the timed steps count in the memory of no row
        return map(batch, range(steps))

    def loss(self, net: nn.Module, *batch: Tensor) -> Tensor:
        clips, labels = batch
        return cross_entropy(answer(net, clips.float()), labels, label_smoothing=self.smoothing)

    @torch.no_grad()
    def test(self, net: nn.Module, timed: bool) -> Work:
        found = []
        for clips in self.test_clips.split(self.data.batch_size):
            with bfloat16(self.device):
                found.append(predict_clips(net, clips.float()))
            yield AHEAD
        yield DONE
        return scores(torch.cat(found).cpu(), self.test_labels, self.data.classes)


class Clips:
    """The training batches of a seed, each made when it is first asked for."""

    def __init__(self, videos: Videos, seed: int) -> None:
        data, self.videos = videos.data, videos
        workers = data.workers and max(data.workers, (os.cpu_count() or 1) - 2)
        self.loader: Any = training_loader(Visits(data.train_set, seed), videos.count, data.batch_size, workers)
        self.made: list[tuple[Tensor, Tensor]] = []
        self.source = self._all()

    def _all(self) -> Iterator[Any]:
        for epoch in count():
            self.loader.sampler.set_epoch(epoch)
            yield from self.loader

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        while number >= len(self.made):
            clips, labels, *_ = next(self.source)
            # on a stream of its own: other runs read the batch, and need not wait for this one
            with torch.cuda.stream(copies(self.videos.device)):
                self.made.append((self.videos._there(clips), labels.to(self.videos.device)))
                if self.videos.device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
        return self.made[number]


@lru_cache(1)
def copies(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


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
        """Yield windows as RandomWindows and Visits do: every epoch has one from each of `windows`
        equal parts of the text, in random order."""
        data, parts, starts = self.data, torch.arange(self.data.windows), []
        places = len(self.text) - data.length
        low, high = parts * places // data.windows, (parts + 1) * places // data.windows
        batch = min(data.batch_size, data.windows)
        rng = torch.Generator().manual_seed(mixed(seed))
        for _ in range(0, steps * batch, data.windows // batch * batch):
            order = torch.randperm(data.windows, generator=rng)
            at = low + (torch.rand(data.windows, generator=rng) * (high - low)).long()
            starts.append(at[order][: data.windows // batch * batch])
        window = torch.arange(data.length + 1, device=self.device)
        for each in torch.cat(starts).to(self.device).split(batch)[:steps]:
            yield (self.text[each[:, None] + window],)

    def loss(self, net: nn.Module, *batch: Tensor) -> Tensor:
        return token_nll(partial(answer, net), *batch).mean()

    @torch.no_grad()
    def test(self, net: nn.Module, timed: bool) -> Work:
        longest, found = self.data.lengths[-1], {}
        for length in self.data.lengths:
            windows = self.test_text.unfold(0, length + 1, length)
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            try:
                for part in windows.split(longest // length):
                    total += token_nll(partial(answer, net), part).double().sum()
                    yield AHEAD
            except torch.OutOfMemoryError:
                continue
            found[f"bits_{length}"] = total / self.data.tested / math.log(2)
        yield DONE
        bits = {name: float(value) for name, value in found.items()}
        return {"bits_per_byte": bits.get(f"bits_{self.data.length}"), **bits}


def kinds() -> dict[str, tuple[Any, Any]]:
    from ndlightnet.training import ImageFolders
    from ndlightnet_evidence.photographs import Photographs

    return {
        "ImageData": (ImageData, Images),
        "ImageFolders": (ImageFolders, Photographs),
        "VideoData": (VideoData, Videos),
        "TextData": (TextData, Text),
    }


def load(config: dict[str, Any]) -> Samples:
    """Read the data of a config, whose class must be one of `kinds`."""
    name, known = config["data"]["class_path"].rpartition(".")[2], kinds()
    if name not in known:
        raise ValueError(f"data: {name}: expected {', '.join(known)}")
    module, kind = known[name]
    found: Samples = kind(module(**config["data"]["init_args"]), config["trainer"]["max_epochs"])
    found.smoothing = config["model"].get("label_smoothing", found.smoothing)
    return found
