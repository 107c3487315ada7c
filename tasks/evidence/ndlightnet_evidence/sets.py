"""What a small network is trained and tested on: images or volumes, photographs, bytes of text.

The batches of a seed are the same for every network: their order and augmentation follow from the seed alone. Images
to test with are read once, and lie on the card.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ndlightnet import Replay
from ndlightnet.training import ImageData, ImageFolders, Pathfinder, TextData
from ndlightnet.training.classification.scores import scores
from ndlightnet.training.language.measures import extent, token_nll
from ndlightnet.training.language.text_task import TextLoss
from ndlightnet_evidence import runner
from ndlightnet_evidence.tables import Run

EVALUATED = 200  # images in a batch of a test
SMOOTHING = 0.1  # of the labels in the cross-entropy of a classification, by default


def logits(net: nn.Module, x: Tensor) -> Tensor:
    """Return logits in float32, on a card computed in bfloat16."""
    kind = x.device.type
    with torch.autocast(kind, torch.bfloat16, kind == "cuda", cache_enabled=False):
        out: Tensor = net(x)
    return out.float()


class Samples(ABC):
    """Data with their loss and test. steps: those of a training, as the config says."""

    measures: tuple[str, ...]  # the first one is shown and drawn

    def __init__(self, data: Any, config: dict[str, Any]) -> None:
        data.setup("fit")
        self.data, self.device = data, runner.device()
        self.steps = config["trainer"]["max_epochs"] * len(data.train_dataloader())

    def batches(self, seed: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield the inputs of `loss` for each step of a training."""
        self.data.seed = seed
        loader = self.data.train_dataloader()

        def epochs() -> Iterator[Any]:
            for epoch in count():
                loader.sampler.set_epoch(epoch)
                yield from loader

        for batch in islice(epochs(), steps):
            batch = self.data.transfer_batch_to_device(batch, self.device, 0)
            batch = self.data.on_after_batch_transfer(batch, 0)
            yield (batch,) if isinstance(batch, Tensor) else batch[:2]

    @abstractmethod
    def loss(self, net: nn.Module, *batch: Tensor) -> Tensor:
        """Return the loss of a batch, to be captured in a graph."""

    def validate(self, net: nn.Module) -> Run | None:
        """Measure a network on a held-out part of the training data; None without such a part."""
        return None

    @abstractmethod
    def test(self, net: nn.Module) -> Run:
        """Test a network; return its measures."""


class Labelled(Samples):
    """Images, volumes or photographs of one size with their classes (ImageData, ImageFolders)."""

    def __init__(self, data: ImageData | ImageFolders, config: dict[str, Any]) -> None:
        super().__init__(data, config)
        self.smoothing = config["model"].get("label_smoothing", SMOOTHING)
        loaders = {"validation": data.val_dataloader()}
        data.setup("test")
        loaders["test"] = data.test_dataloader()
        self.splits = {name: self._read(loader) for name, loader in loaders.items() if len(loader)}
        self.measures = ("auc", "top1") if len(data.classes) == 2 else ("top1",)

    def _read(self, loader: Any) -> tuple[Tensor, Tensor]:
        """Return normalised images and their labels, on the card."""
        batches = [self.data.on_after_batch_transfer(batch, 0)[:2] for batch in loader]
        images, labels = (torch.cat(column).to(self.device) for column in zip(*batches, strict=True))
        return images, labels

    def loss(self, net: nn.Module, *batch: Tensor) -> Tensor:
        images, labels = batch
        return cross_entropy(logits(net, images), labels, label_smoothing=self.smoothing)

    def validate(self, net: nn.Module) -> Run | None:
        return self.test(net, "validation") if "validation" in self.splits else None

    @torch.no_grad()
    def test(self, net: nn.Module, split: str = "test") -> Run:
        images, labels = self.splits[split]
        replay = Replay(lambda x: logits(net, x).softmax(-1), images[:EVALUATED].clone())
        probs = torch.cat([replay(batch)[: len(batch)].clone() for batch in images.split(EVALUATED)])
        return scores(probs.cpu(), labels.cpu(), self.data.classes)


class Text(Samples):
    """A text (TextData), tested in windows of several lengths."""

    def __init__(self, data: TextData, config: dict[str, Any]) -> None:
        super().__init__(data, config)
        self.measures = ("bits_per_byte", *(f"bits_{n}" for n in data.lengths))

    def loss(self, net: nn.Module, *batch: Tensor) -> Tensor:
        kind = batch[0].device.type
        with torch.autocast(kind, torch.bfloat16, kind == "cuda", cache_enabled=False):
            return TextLoss(net)(*batch)

    @torch.no_grad()
    def test(self, net: nn.Module) -> Run:
        bits, text = {}, extent(self.data.test_text[1:], self.data.loaded_tokenizer())
        for length, loader in zip(self.data.lengths, self.data.test_dataloader(), strict=True):
            try:
                with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda"):
                    nats = sum(token_nll(net, x.to(self.device)).double().sum() for x, _ in loader)
            except torch.OutOfMemoryError:
                continue
            bits[f"bits_{length}"] = float(nats) / text.bytes / math.log(2)
        return {"bits_per_byte": bits.get(f"bits_{self.data.length}"), **bits}


KINDS: dict[str, tuple[Any, type[Samples]]] = {
    "ImageData": (ImageData, Labelled),
    "ImageFolders": (ImageFolders, Labelled),
    "Pathfinder": (Pathfinder, Labelled),
    "TextData": (TextData, Text),
}


def load(config: dict[str, Any]) -> Samples:
    """Read the data of a config, or make them, whose class must be one of KINDS."""
    name = config["data"]["class_path"].rpartition(".")[2]
    if name not in KINDS:
        raise ValueError(f"data: {name}: expected {', '.join(KINDS)}")
    module, kind = KINDS[name]
    data = module(**config["data"]["init_args"])
    data.prepare_data()
    return kind(data, config)
