"""Photographs in class folders (ImageFolders) that fit on the card, augmented there.

Augmented as the config says, but for a batch at once and without what needs a processor:
RandAugment and changes of colour. Crops of random sizes (`scale`) are refused. `moved` is what
RandomCrop with padding and a flip do; erased boxes have the sizes of torchvision's RandomErasing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.transforms.v2 import RandomResizedCrop

from ndlightnet.data.image.image_folder import FolderImages, ImageFiles
from ndlightnet.data.image.image_sets import moved
from ndlightnet.data.image.image_transforms import seeded
from ndlightnet.data.sampling import mixed
from ndlightnet.training import ImageFolders
from ndlightnet.training.classification.scores import scores
from ndlightnet_evidence import runner, sets
from ndlightnet_evidence.tables import Run

EVALUATION = 1000  # images at a time
ERASED, RATIO = (0.02, 0.33), (0.3, 3.3)  # area and sides of erased boxes, as in RandomErasing


class Photographs(sets.Samples):
    """Images of one size, in colour or grey, of a folder of class folders."""

    measures = ("top1",)

    def __init__(self, data: ImageFolders, epochs: int) -> None:
        for stage in ("fit", "test"):
            data.setup(stage)
        augment: Any = data.augment
        if isinstance(augment.transforms[0], RandomResizedCrop):
            raise ValueError("data: scale: expected null, or padding above 0")
        self.data, self.device = data, runner.device()
        splits = {"train": data.train_set, "validation": data.val_set, "test": data.test_set}
        self.splits = {name: self._read(split.files) for name, split in splits.items() if len(split)}
        self.images, self.labels = self.splits["train"]
        self.mean, self.std = (
            torch.tensor(values, device=self.device).view(-1, 1, 1) for values in (data.mean, data.std)
        )
        self.size = min(data.batch_size, len(self.labels))
        self.steps = epochs * (len(self.labels) // self.size)

    def _read(self, files: ImageFiles) -> tuple[Tensor, Tensor]:
        images = FolderImages(files, self.data.channels, self.data.evaluate)
        with ThreadPoolExecutor() as pool:
            samples = list(pool.map(images.__getitem__, range(len(images))))
        pixels = torch.stack([sample.image for sample in samples if sample.image is not None])
        labels = torch.tensor([sample.label for sample in samples if sample.image is not None])
        return pixels.to(self.device), labels.to(self.device)

    def batches(self, seed: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
        size, draws = self.size, torch.Generator(self.device)
        for step in range(steps):
            epoch, batch = divmod(step, len(self.labels) // size)
            if batch == 0:
                draws.manual_seed(mixed(seed, epoch) % 2**63)
                order = torch.randperm(len(self.labels), generator=draws, device=self.device)
            numbers = order[batch * size : (batch + 1) * size]
            images, labels = self._augmented(self.images[numbers], draws), self.labels[numbers]
            if self.data.mixing is not None:
                draw = mixed(seed, 1, step) % 2**63
                images, labels = seeded(self.data.mixing, draw, images, labels)
            yield images, labels

    def _augmented(self, images: Tensor, draws: torch.Generator) -> Tensor:
        data, options = self.data, dict[str, Any](generator=draws, device=self.device)
        shifts = torch.randint(-data.padding, data.padding + 1, (len(images), 2), **options)
        flips = torch.zeros_like(shifts, dtype=torch.bool)
        flips[:, 1] = torch.rand(len(images), **options) < data.hflip
        x = self.normalised(moved(images, shifts, flips))
        return erased(x, data.random_erasing, draws)

    def normalised(self, x: Tensor) -> Tensor:
        return (x.float() / 255 - self.mean) / self.std

    def loss(self, net: nn.Module, *batch: Tensor) -> Tensor:
        images, labels = batch
        return cross_entropy(sets.logits(net, images), labels, label_smoothing=self.smoothing)

    def validate(self, net: nn.Module) -> Run | None:
        return self._measure(net, "validation", 0) if "validation" in self.splits else None

    def test(self, net: nn.Module, timed: bool) -> Run:
        return self._measure(net, "test", sets.TIMED_TESTS * timed)

    def _measure(self, net: nn.Module, split: str, timed: int) -> Run:
        images, labels = self.splits[split]
        probs, latency = sets.classified(net, self.normalised, images, EVALUATION, timed)
        return {**scores(probs, labels.cpu(), self.data.classes), "latency_ms": latency}


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
