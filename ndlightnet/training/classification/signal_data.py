"""Recordings of different lengths, in batches with and without padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ndlightnet.data.errors import DataError
from ndlightnet.data.packing import PackCollate, PadCollate
from ndlightnet.data.signal.recordings import SignalDataset, read_recordings
from ndlightnet.training.core.data_module import LabelledData, train_and_held_out


class SignalData(LabelledData):
    """A folder of recorded digits, as ndlightnet.data.signal.recordings reads it.

    Args:
        root: the folder.
        spectrum: (window, step) in samples: the network gets window / 2 channels of a short-time spectrum every `step`
            samples. None: the samples themselves, one channel.
        batching: "packed" puts the recordings of a batch end to end, "padded" pads them to the longest, with a mask.
            Batches hold the same recordings either way.
        batch_size: recordings per batch, drawn without regard to their lengths.
        validation: fraction of the training recordings that chooses the best checkpoint; 0: none, the last checkpoint
            counts. The test recordings are not used for this.
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
        super().__init__(root, batch_size, workers)
        self.spectrum, self.batching, self.validation = spectrum, batching, validation

    @property
    def channels(self) -> int:
        return self.spectrum[0] // 2 if self.spectrum else 1

    def setup(self, stage: str) -> None:
        super().setup(stage)
        recordings = read_recordings(self.root)
        self.classes = tuple(str(digit) for digit in range(max(recordings.digits) + 1))
        train, test = recordings.split()
        fitted, chosen = train_and_held_out(self.validation, train)  # spread over digits and takes
        if not fitted or not test:
            counts = f"{len(fitted)} recordings to train, {len(test)} to test"
            raise DataError(f"{self.root}: {counts}: expected some of both")
        self.train_set, self.val_set, self.test_set = (
            SignalDataset(recordings, numbers, numbers is fitted, self.spectrum) for numbers in (fitted, chosen, test)
        )

    @property
    def collate(self) -> Callable[..., Any]:  # type: ignore[override]
        """The function that makes batches for the trainer's network."""
        net: Any = self.trainer.lightning_module.net  # type: ignore[union-attr]
        return PackCollate(net.embed.patch) if self.batching == "packed" else PadCollate()
