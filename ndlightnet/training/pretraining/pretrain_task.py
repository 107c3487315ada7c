"""Masked pre-training of a network on samples without labels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.data.errors import DataError
from ndlightnet.data.sampling import mixed
from ndlightnet.layout import per_axis
from ndlightnet.models import NDLightNet
from ndlightnet.models.masked import MaskedDecoder, masked_loss
from ndlightnet.training.core.optim import adamw
from ndlightnet.training.core.options import check
from ndlightnet.training.core.task import Task
from ndlightnet.training.generation.sample_sheets import save_sheet
from ndlightnet.training.report.results import write_metrics

SHEET = 8  # samples in a sheet


class MaskedLoss(nn.Module):
    """Mean squared error of what was dropped of samples, see `masked_loss`."""

    def __init__(self, net: NDLightNet, decoder: MaskedDecoder, box: tuple[int, ...], dropped: float) -> None:
        super().__init__()
        self.net, self.decoder, self.box, self.dropped = net, decoder, box, dropped

    def forward(self, x: Tensor) -> Tensor:
        loss, _ = masked_loss(self.net, self.decoder, x, self.box, self.dropped)
        return loss


class PretrainTask(Task):
    """Trains `net` to predict what was dropped of its inputs; the labels of data are not used. A
    training with labels begins with its weights: `--model.init RUN/checkpoints/last.ckpt`.

    Boxes of a sample's tokens are dropped at random and not computed. A decoder predicts their
    cells, which are normalised patch by patch (ndlightnet.models.masked_loss). `explained` is the
    fraction of the variance within the dropped patches that is predicted: 0 for the mean of each.

    Args:
        net: an NDLightNet, not causal, whose mixers merge States: LightNetAttention (Identity, as
            the baseline, sees each box alone).
        box: tokens of a box, an int or one per axis. As long as an axis, it drops all of it.
        dropped: fraction of the boxes that is dropped.
        decoder_dim, decoder_depth: width and number of blocks of the decoder.
        others: as in Task.
    """

    only_float32 = True
    monitor = "val_explained"

    def __init__(
        self,
        net: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        box: int | list[int] = 2,
        dropped: float = 0.75,
        decoder_dim: int = 96,
        decoder_depth: int = 2,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, lr=lr, weight_decay=weight_decay, **kwargs)
        check("model.compile", self.compiles, not self.compiles, "false for pre-training")
        check("model.dropped", dropped, 0 < dropped < 1, "a fraction between 0 and 1")
        if not isinstance(net, NDLightNet):
            raise DataError(f"model.net: {type(net).__name__}, expected an NDLightNet")
        try:
            self.box = per_axis("model.box", box, net.dims)
            self.decoder = MaskedDecoder(net, decoder_dim, decoder_depth)
        except ValueError as error:
            raise DataError(error) from error
        self.dropped = dropped
        vars(self)["called"] = MaskedLoss(net, self.decoder, self.box, dropped)

    def setup(self, stage: str) -> None:
        data = self.data()
        if not hasattr(data, "space"):
            raise DataError(f"data={type(data).__name__}: expected samples of one size")
        self.expect(in_chans=data.channels, dims=len(data.space))
        cells = [p * b for p, b in zip(self.decoder.patch, self.box, strict=True)]
        good = all(n % c == 0 for n, c in zip(data.space, cells, strict=True))
        expected = f"multiples of {cells}, boxes of {list(self.box)} tokens of {list(self.decoder.patch)} cells"
        check("data.size", list(data.space), good, expected)

    def configure_optimizers(self) -> Any:
        check("model.layer_decay", self.layer_decay, self.layer_decay is None, "null")
        both = nn.ModuleDict({"net": self.net, "decoder": self.decoder})
        return adamw(self, both)

    def samples(self, batch: Any) -> Tensor:
        """Return what the network sees of a batch: (samples, channels, *space)."""
        x: Tensor = batch[0]
        if x.ndim == len(self.data().space) + 3:  # several clips of each video
            x = x.flatten(0, 1)
        convert = getattr(self.data(), "network_input", None)
        return x if convert is None else convert(x)

    def example_inputs(self) -> tuple[Tensor, ...]:
        data = self.data()
        return (torch.zeros(data.batch_size, data.channels, *data.space, device=self.device),)

    def training_step(self, batch: tuple[Any, ...], _: int) -> Tensor:
        loss: Tensor = self(self.samples(batch))
        self.log("loss", loss, prog_bar=True, batch_size=len(batch[0]))
        return loss

    def on_validation_epoch_start(self) -> None:
        trainer = self.trainer
        batches = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
        # of many batches some of each: data are sorted by class
        self.each = math.ceil(SHEET / max(1, sum(map(int, batches))))
        # samples, their reconstructions, and which cells of them were dropped
        self.sheet: list[tuple[Tensor, Tensor, Tensor]] = []

    def validation_step(self, batch: tuple[Any, ...], number: int) -> None:
        if len(batch[0]):  # 0: no file of the batch could be read
            explained = self._explained(batch, number)
            self.log("val_explained", explained, prog_bar=True, batch_size=len(batch[0]), sync_dist=True)

    def _explained(self, batch: tuple[Any, ...], number: int) -> Tensor:
        """Return the explained variance of a batch; keep its first samples for the sheet."""
        x = self.samples(batch)
        net: Any = self.net
        generator = torch.Generator(self.device).manual_seed(mixed(0, number))  # the same boxes each time
        _loss, predicted = masked_loss(net, self.decoder, x, self.box, self.dropped, generator)
        room = min(self.each, SHEET - sum(len(x) for x, *_ in self.sheet))
        if room > 0:
            x, cells, dropped = (y[:room].cpu() for y in (x, predicted.cells, predicted.dropped))
            self.sheet.append((x, cells, dropped))
        return predicted.explained

    def on_validation_epoch_end(self) -> None:
        trainer = self.trainer
        if trainer.sanity_checking or not trainer.is_global_zero or not self.sheet:
            return
        folder = self.out() / "reconstructions"
        name = "test" if trainer.testing else f"epoch_{trainer.current_epoch + 1:04d}"
        x, cells, dropped = (torch.cat(tensors) for tensors in zip(*self.sheet, strict=True))
        save_reconstructions(folder / f"{name}.png", x, cells, dropped, self.data())

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()
        self.tested: list[tuple[float, int]] = []

    def test_step(self, batch: tuple[Any, ...], number: int) -> None:
        if len(batch[0]):
            self.tested.append((float(self._explained(batch, number)), len(batch[0])))

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()
        count = sum(number for _, number in self.tested)
        if not count:
            raise DataError(f"{self.data().root}: no file of the test could be read")
        explained = sum(value * number for value, number in self.tested) / count
        measures = {"explained": explained, "samples": count, "dropped": self.dropped, "box": list(self.box)}
        metrics = {**measures, **self.costs()}
        if self.trainer.is_global_zero:
            write_metrics(self.out(), metrics)
        self.summary = f"explained {explained:.3f} of what was dropped, over {count} samples; see {self.out()}"


def save_reconstructions(path: Path, x: Tensor, cells: Tensor, dropped: Tensor, data: Any) -> None:
    """Write a sheet of samples x (n, channels, *space): what was left of them, what was predicted
    (`cells`, as x), the samples themselves. dropped: (n, *space) bool."""
    grey = torch.where(dropped[:, None], torch.zeros_like(x), x)
    rows = (("left", grey), ("predicted", cells), ("sample", x))
    # of six channels of a clip the first three are the frames
    save_sheet(path, [(name, list(data.to_pixels(samples)[:, :3])) for name, samples in rows])
