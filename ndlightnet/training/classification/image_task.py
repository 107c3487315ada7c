"""Classification of images and volumes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.classification import BinaryAUROC

from ndlightnet.data.errors import DataError, one_line
from ndlightnet.data.packing import token_count
from ndlightnet.inference import mirrorings
from ndlightnet.models.hub import Pretrained
from ndlightnet.training.classification.answer_figures import save_gallery
from ndlightnet.training.classification.classification_task import FileClassificationTask
from ndlightnet.training.core.costs import latencies
from ndlightnet.training.core.options import check


class ImageTask(FileClassificationTask):
    """Trains `net`, images `(batch, channels, *space)` -> `(batch, classes)` logits, and measures it. `predict` writes
    predictions.csv and predictions.png, some of the images, the least certain first.

    Args:
        net: the network.
        mirror: axes of space; probabilities are means over all ways to mirror the image along them.
        others: as in ClassificationTask.
    """

    only_float32 = True
    samples = "images"

    def __init__(self, net: nn.Module, *, mirror: tuple[int, ...] = (), **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.mirror = mirror
        self.val_auc = BinaryAUROC()

    def setup(self, stage: str) -> None:
        dims = getattr(self.net, "dims", None)
        if dims is not None:
            good = all(0 <= axis < dims for axis in self.mirror)
            check("model.mirror", self.mirror, good, f"axes from 0 to {dims - 1}")
        if stage == "predict":
            return  # classes and size come with the checkpoint
        data = self.data()
        self.expect(dims=len(data.space), in_chans=data.channels, num_classes=len(data.classes))

    def on_fit_start(self) -> None:
        self.try_network()
        super().on_fit_start()

    def on_test_start(self) -> None:
        self.try_network()

    def try_network(self) -> None:
        """Raise DataError if a network of another library cannot take the images, or gives other than a number for
        each class; for ours `setup` has compared the arguments."""
        if isinstance(self.net, Pretrained):
            return
        data, training, precision = self.data(), self.net.training, self.trainer.precision_plugin
        image = torch.zeros(1, data.channels, *data.space, device=self.device)
        name, size = type(self.net).__name__, tuple(image.shape[1:])
        try:
            with torch.no_grad(), precision.forward_context():
                output = self.net.eval()(precision.convert_input(image))
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            raise DataError(f"model.net={name}: cannot take images of {size} ({one_line(error)})") from error
        self.net.train(training)
        shape, expected = tuple(getattr(output, "shape", ())), (1, len(data.classes))
        check(f"model.net={name}", f"output {shape} of an image", shape == expected, f"{expected}")

    def example_inputs(self) -> tuple[Tensor, ...]:
        data = self.data()
        return (torch.zeros(data.batch_size, data.channels, *data.space, device=self.device),)

    def probabilities(self, *inputs: Any) -> Tensor:
        (images,), answer = inputs, super().probabilities
        return torch.stack([answer(images.flip(way)) for way in mirrorings(self.mirror)]).mean(0)

    def log_validation(self, probabilities: Tensor, labels: Tensor) -> None:
        super().log_validation(probabilities, labels)
        if probabilities.shape[1] == 2:
            self.val_auc.update(probabilities[:, 1], labels)
            self.log("val_auc", self.val_auc, prog_bar=True)

    def on_validation_epoch_start(self) -> None:
        self.validated = 0

    def validation_step(self, batch: tuple[Any, ...], number: int) -> None:
        self.validated += len(batch[0])
        if len(batch[0]):  # 0: no file of the batch could be read
            super().validation_step(batch, number)

    def on_validation_epoch_end(self) -> None:
        if not self.validated:
            raise DataError(f"{self.data().root}: no file of the validation could be read")

    def on_test_epoch_start(self) -> None:
        super().on_test_epoch_start()
        self.timed: Tensor | None = None

    def test_step(self, batch: tuple[Any, ...], number: int) -> None:
        if not len(batch[0]):
            return
        self.timed = batch[0] if self.timed is None else self.timed
        super().test_step(batch, number)

    def on_test_epoch_end(self) -> None:
        self.gather_lines()
        super().on_test_epoch_end()

    def more_metrics(self, probabilities: Tensor, labels: Tensor) -> dict[str, Any]:
        patch = getattr(getattr(self.net, "embed", None), "patch", None)
        return {
            "tokens": token_count(self.data().space, patch) if patch else None,
            **self.costs(),
            **({} if self.timed is None else latencies(self, self.timed)),
        }

    def sample(self, number: int) -> tuple[Tensor, Tensor]:
        picture = self.data().picture(number)
        return self.data().from_pixels(picture[None])[0], picture

    def save_samples(self, numbers: list[int], probabilities: Tensor, labels: Tensor | None) -> None:
        data, name = self.data(), "predictions.png" if labels is None else "test_images.png"
        captions = self.figure_names(data.classes)
        save_gallery(self.out() / name, lambda row: data.picture(numbers[row]), probabilities, labels, captions)

    def save_predicted(self, numbers: list[int], probabilities: Tensor) -> None:
        self.save_samples(numbers, probabilities, None)
