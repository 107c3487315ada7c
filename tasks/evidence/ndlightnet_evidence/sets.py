"""What a small network is trained and tested on: images or volumes, photographs, bytes of text.

The data are read once, lie on the card, and serve all runs. The batches of a seed are the same for
every network: their order and augmentation follow from the seed alone.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.transforms.v2 import RandomResizedCrop

from ndlightnet.data.image.image_folder import FolderImages, ImageFiles
from ndlightnet.data.image.image_sets import ImageSet, moved
from ndlightnet.data.image.image_transforms import seeded
from ndlightnet.data.sampling import mixed
from ndlightnet.training import ImageData, ImageFolders, TextData
from ndlightnet.training.classification.scores import scores
from ndlightnet.training.language.measures import token_nll
from ndlightnet_evidence import runner
from ndlightnet_evidence.cuda_graphs import Replay
from ndlightnet_evidence.device_memory import seconds
from ndlightnet_evidence.tables import Run

TIMED = 20  # steps
TIMED_TESTS = 5
ERASED, RATIO = (0.02, 0.33), (0.3, 3.3)  # area and sides of erased boxes, as in torchvision's RandomErasing


def logits(net: nn.Module, x: Tensor) -> Tensor:
    """Return logits in float32, on a card computed in bfloat16."""
    kind = x.device.type
    with torch.autocast(kind, torch.bfloat16, kind == "cuda", cache_enabled=False):
        out: Tensor = net(x)
    return out.float()


class Samples(ABC):
    """Data with their loss and test. steps: those of a training, as the config says. smoothing: of
    the labels in the cross-entropy of a classification."""

    measures: tuple[str, ...]  # the first one is shown and drawn
    steps: int
    smoothing = 0.1

    def __init__(self, data: Any) -> None:
        data.setup("fit")
        self.data, self.device = data, runner.device()
        self.schedule = lru_cache(2)(self._schedule)

    def _schedule(self, seed: int, steps: int) -> list[Any]:
        """Return the batches of the loader as columns, (steps, batch, ...) on the card."""
        self.data.seed = seed
        loader = self.data.train_dataloader()

        def epochs() -> Iterator[Any]:
            for epoch in count():
                loader.sampler.set_epoch(epoch)
                yield from loader

        columns = zip(*map(self.drawn, islice(epochs(), steps)), strict=True)
        return [torch.stack(c).to(self.device) if isinstance(c[0], Tensor) else c for c in columns]

    def drawn(self, batch: Any) -> tuple[Any, ...]:
        """Return what of a loader's batch is kept."""
        return (batch,)

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


class Labelled(Samples):
    """Images or volumes with their classes. splits: images and labels of "train", "test" and perhaps "validation".
    evaluated: images in a batch of a test."""

    splits: dict[str, tuple[Tensor, Tensor]]
    evaluated: int

    @abstractmethod
    def normalised(self, x: Tensor) -> Tensor:
        """Return images as a network takes them."""

    def loss(self, net: nn.Module, *batch: Tensor) -> Tensor:
        images, labels = batch
        return cross_entropy(logits(net, images), labels, label_smoothing=self.smoothing)

    def validate(self, net: nn.Module) -> Run | None:
        return self._measure(net, "validation", 0) if "validation" in self.splits else None

    def test(self, net: nn.Module, timed: bool) -> Run:
        return self._measure(net, "test", TIMED_TESTS * timed)

    @torch.no_grad()
    def _measure(self, net: nn.Module, split: str, timed: int) -> Run:
        (images, labels), size = self.splits[split], self.evaluated
        replay = Replay(lambda x: logits(net, self.normalised(x)).softmax(-1), images[:size].clone())
        times = [seconds(partial(replay, images[:size])) for _ in range(timed)]
        probs = torch.cat([replay(batch)[: len(batch)].clone() for batch in images.split(size)])
        latency = 1e3 * statistics.median(times) if times else None
        return {**scores(probs.cpu(), labels.cpu(), self.data.classes), "latency_ms": latency}


class Images(Labelled):
    """Grey images or volumes of one size (ImageData)."""

    evaluated = 200

    def __init__(self, data: ImageData, epochs: int) -> None:
        super().__init__(data)
        self.measures = ("auc", "top1") if len(data.classes) == 2 else ("top1",)
        train, test = data.train_set, data.test_set
        splits = {"train": train, "test": test}
        self.splits = {
            name: (split.images[:, None].to(self.device), split.labels.to(self.device))
            for name, split in splits.items()
        }
        # the loader's batches tell the numbers of the images; the images themselves are here
        nothing = train.images.new_empty(len(train), *[0] * (train.images.ndim - 1))
        data.train_set = ImageSet(nothing, train.labels)
        self.steps = epochs * len(data.train_dataloader())

    def drawn(self, batch: Any) -> tuple[Any, ...]:
        _, _, *numbers_and_moves = batch
        return tuple(numbers_and_moves)

    def batches(self, seed: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
        for numbers, *moves in zip(*self.schedule(seed, steps), strict=True):
            images, labels = (x.index_select(0, numbers) for x in self.splits["train"])
            images, labels, _ = self.data.on_after_batch_transfer((images, labels, numbers, *moves), 0)
            yield images, labels

    def normalised(self, x: Tensor) -> Tensor:
        return (x.float() - self.data.mean) / self.data.std


class Photographs(Labelled):
    """Photographs of one size in class folders (ImageFolders).

    Augmented as the config says, but for a batch at once and without what needs a processor:
    RandAugment and changes of colour. Crops of random sizes (`scale`) are refused.
    """

    measures, evaluated = ("top1",), 1000

    def __init__(self, data: ImageFolders, epochs: int) -> None:
        super().__init__(data)
        data.setup("test")
        augment: Any = data.augment
        if isinstance(augment.transforms[0], RandomResizedCrop):
            raise ValueError("data: scale: expected null, or padding above 0")
        splits = {"train": data.train_set, "validation": data.val_set, "test": data.test_set}
        self.splits = {name: self._read(split.files) for name, split in splits.items() if len(split)}
        self.mean, self.std = (
            torch.tensor(values, device=self.device).view(-1, 1, 1) for values in (data.mean, data.std)
        )
        self.size = min(data.batch_size, len(self.splits["train"][1]))
        self.steps = epochs * (len(self.splits["train"][1]) // self.size)

    def _read(self, files: ImageFiles) -> tuple[Tensor, Tensor]:
        images = FolderImages(files, self.data.channels, self.data.evaluate)
        with ThreadPoolExecutor() as pool:
            samples = list(pool.map(images.__getitem__, range(len(images))))
        pairs = [(x.image, x.label) for x in samples if x.image is not None]
        pixels, labels = zip(*pairs, strict=True)
        return torch.stack(pixels).to(self.device), torch.tensor(labels, device=self.device)

    def batches(self, seed: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
        (images, labels), size, draws = self.splits["train"], self.size, torch.Generator(self.device)
        for step in range(steps):
            epoch, batch = divmod(step, len(labels) // size)
            if batch == 0:
                draws.manual_seed(mixed(seed, epoch) % 2**63)
                order = torch.randperm(len(labels), generator=draws, device=self.device)
            numbers = order[batch * size : (batch + 1) * size]
            x, y = self._augmented(images[numbers], draws), labels[numbers]
            if self.data.mixing is not None:
                x, y = seeded(self.data.mixing, mixed(seed, 1, step) % 2**63, x, y)
            yield x, y

    def _augmented(self, images: Tensor, draws: torch.Generator) -> Tensor:
        data, options = self.data, dict[str, Any](generator=draws, device=self.device)
        shifts = torch.randint(-data.padding, data.padding + 1, (len(images), 2), **options)
        flips = torch.zeros_like(shifts, dtype=torch.bool)
        flips[:, 1] = torch.rand(len(images), **options) < data.hflip
        return erased(self.normalised(moved(images, shifts, flips)), data.random_erasing, draws)

    def normalised(self, x: Tensor) -> Tensor:
        return (x.float() / 255 - self.mean) / self.std


def erased(x: Tensor, probability: float, draws: torch.Generator) -> Tensor:
    """Set a random box of some images (batch, channels, h, w) to 0, the mean."""
    if not probability:
        return x
    n, _, height, width = x.shape
    some, area, ratio, top, left = torch.rand(5, n, 1, generator=draws, device=x.device)
    area = (ERASED[0] + (ERASED[1] - ERASED[0]) * area) * height * width
    ratio = torch.exp(math.log(RATIO[0]) + (math.log(RATIO[1]) - math.log(RATIO[0])) * ratio)
    tall, wide, lines = (area * ratio).sqrt(), (area / ratio).sqrt(), []
    for size, side, start in ((height, tall, top), (width, wide, left)):
        index = torch.arange(size, device=x.device)
        first = start * (size - side).clamp(min=0)
        lines.append((index >= first) & (index < first + side))
    box = lines[0][:, :, None] & lines[1][:, None] & (some < probability)[:, :, None]
    return x.masked_fill(box[:, None], 0)


class Text(Samples):
    """Bytes of a text (TextData), tested in windows of several lengths."""

    def __init__(self, data: TextData, epochs: int) -> None:
        super().__init__(data)
        self.steps = epochs * len(data.train_dataloader())
        self.measures = ("bits_per_byte", *(f"bits_{n}" for n in data.lengths))

    def batches(self, seed: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
        (windows,) = self.schedule(seed, steps)
        for batch in windows:
            yield (batch,)

    def loss(self, net: nn.Module, *batch: Tensor) -> Tensor:
        return token_nll(partial(logits, net), *batch).mean()

    @torch.no_grad()
    def test(self, net: nn.Module, timed: bool) -> Run:
        bits = {}
        for length, loader in zip(self.data.lengths, self.data.test_dataloader(), strict=True):
            try:
                nats = sum(token_nll(partial(logits, net), x.to(self.device)).double().sum() for x, _ in loader)
            except torch.OutOfMemoryError:
                continue
            bits[f"bits_{length}"] = float(nats) / self.data.tested / math.log(2)
        return {"bits_per_byte": bits.get(f"bits_{self.data.length}"), **bits}


KINDS: dict[str, tuple[Any, Callable[..., Samples]]] = {
    "ImageData": (ImageData, Images),
    "ImageFolders": (ImageFolders, Photographs),
    "TextData": (TextData, Text),
}


def load(config: dict[str, Any]) -> Samples:
    """Read the data of a config, whose class must be one of KINDS."""
    name = config["data"]["class_path"].rpartition(".")[2]
    if name not in KINDS:
        raise ValueError(f"data: {name}: expected {', '.join(KINDS)}")
    module, kind = KINDS[name]
    samples = kind(module(**config["data"]["init_args"]), config["trainer"]["max_epochs"])
    samples.smoothing = config["model"].get("label_smoothing", samples.smoothing)
    return samples
