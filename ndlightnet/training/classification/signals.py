"""Classification of signals of different lengths, in batches with and without padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ndlightnet.data.errors import DataError
from ndlightnet.data.folders import find_root
from ndlightnet.data.packing import PackCollate, PadCollate
from ndlightnet.data.sampling import SeededSamples
from ndlightnet.data.signal.recordings import SignalDataset, read_recordings
from ndlightnet.layout import Packed
from ndlightnet.training.classification.data import LabelledData, held_out
from ndlightnet.training.classification.task import ClassificationTask
from ndlightnet.training.core.costs import training_costs
from ndlightnet.training.core.loading import training_loader


class SignalData(LabelledData):
    """A folder of recorded digits, as ndlightnet.data.signal.recordings reads it.

    Args:
        root: the folder.
        spectrum: (window, step) in samples: the network gets window / 2 channels of a short-time
            spectrum every `step` samples. None: the samples themselves, one channel.
        batching: "packed" puts the recordings of a batch end to end, "padded" pads them to the
            longest, with a mask. Batches hold the same recordings either way.
        batch_size: recordings per batch, drawn without regard to their lengths.
        validation: fraction of the training recordings that chooses the best checkpoint; 0: none,
            the last checkpoint counts. The test recordings are not used for this.
        workers: processes that prepare batches.
    """

    def __init__(
        self,
        root: str,
        spectrum: tuple[int, int] | None = None,
        batching: Literal["packed", "padded"] = "packed",
        batch_size: int = 64,
        validation: float = 0.1,
        workers: int = 2,
    ) -> None:
        super().__init__()
        self.root, self.spectrum, self.batching = find_root(root), spectrum, batching
        self.batch_size, self.validation, self.workers = batch_size, validation, workers

    @property
    def channels(self) -> int:
        return self.spectrum[0] // 2 if self.spectrum else 1

    def setup(self, stage: str) -> None:
        self.seed = torch.initial_seed()
        recordings = read_recordings(self.root)
        self.classes = tuple(str(digit) for digit in range(max(recordings.digits) + 1))
        train, test = recordings.split()
        held = held_out(self.validation, len(train))  # spread over digits and takes
        parts = ([n for i, n in enumerate(train) if i not in held], [n for i, n in enumerate(train) if i in held], test)
        if not parts[0] or not test:
            raise DataError(
                f"{self.root}: {len(parts[0])} recordings to train, {len(test)} to test: expected some of both"
            )
        self.train_set, self.val_set, self.test_set = (
            SignalDataset(recordings, part, i == 0, self.spectrum) for i, part in enumerate(parts)
        )

    def collate(self) -> Callable[..., Any]:
        """Return the function that makes batches for the trainer's network."""
        net: Any = self.trainer.lightning_module.net  # type: ignore[union-attr]
        return PackCollate(net.embed.patch) if self.batching == "packed" else PadCollate()

    def train_dataloader(self) -> Any:
        signals, count = SeededSamples(self.train_set, self.seed), len(self.train_set)
        return training_loader(signals, count, self.batch_size, self.workers, self.collate())

    def val_dataloader(self) -> Any:
        return self._still(self.val_set) if len(self.val_set) else []

    def test_dataloader(self) -> Any:
        return self._still(self.test_set)

    def _still(self, samples: SignalDataset) -> DataLoader[Any]:
        return DataLoader(samples, batch_size=self.batch_size, collate_fn=self.collate())


class SignalTask(ClassificationTask):
    """Trains `net`, packed or padded signals -> `(batch, classes)` logits, and measures it.

    Args: as in ClassificationTask.
    """

    saved = (*ClassificationTask.saved, "cost", "slots")
    measures = "step"
    samples = "recordings"
    tokens, slots = 0, 0  # over all training steps; `slots` with padding

    def setup(self, stage: str) -> None:
        data = self.data()
        self.expect(in_chans=data.channels, num_classes=len(data.classes))

    def on_train_batch_start(self, batch: tuple[Any, ...], _: int) -> None:
        if isinstance(batch[0], Packed):
            tokens = slots = batch[0].layout.length
        else:
            mask: Tensor = self.net.token_mask(batch[1])  # type: ignore[operator]
            tokens, slots = int(mask.sum()), mask.numel()
        self.tokens, self.slots = self.tokens + tokens, self.slots + slots

    def more_metrics(self, probabilities: Tensor, labels: Tensor) -> dict[str, Any]:
        padded = 1 - self.tokens / self.slots if self.slots else None
        return {**training_costs(self.net, self.cost), "padded_share": padded}

    def sample(self, number: int) -> tuple[Tensor, Tensor]:
        signal = self.data().test_set[number][0]
        low, high = signal.min(), signal.max()
        return signal, ((signal - low) / (high - low).clamp(min=1e-9) * 255).to(torch.uint8)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["slots"] = [self.tokens, self.slots]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.tokens, self.slots = checkpoint["slots"]
