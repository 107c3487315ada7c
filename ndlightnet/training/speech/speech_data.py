"""Recordings of speech with their texts, and texts to speak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndlightnet.data.errors import DataError, readable
from ndlightnet.data.folders import list_files
from ndlightnet.data.made.babble import make_babble
from ndlightnet.data.signal.sound import SOUNDS, MelScale, read_audio
from ndlightnet.data.text.tokenizer import ByteTokenizer
from ndlightnet.data.threads import in_threads
from ndlightnet.layout.pack import pad_rows
from ndlightnet.training.core.data_module import DataModule, train_and_held_out
from ndlightnet.training.core.options import check
from ndlightnet.training.report.results import log_rank_zero

TABLE = "metadata.csv"


class Spoken(NamedTuple):
    """A batch: letters (batch, length) int64 and mask; spectra (batch, frames, bands), each band of mean 0 and standard
    deviation 1 over the training, and frame_mask; masks are False for padding, at the end; numbers (batch,)."""

    text: Tensor
    mask: Tensor
    spectra: Tensor
    frame_mask: Tensor
    numbers: Tensor


class Line(NamedTuple):
    """A text to speak: what its results are called, and the text."""

    name: str
    text: str


def collate_spoken(items: Sequence[tuple[Tensor, Tensor, int]]) -> Spoken:
    """Return the batch of samples (letters (length,), spectrum (frames, bands), number)."""
    texts, spectra, numbers = zip(*items, strict=True)
    return Spoken(*pad_rows(texts), *pad_rows(spectra), torch.tensor(numbers))


def letters_of(text: str) -> Tensor:
    """Return the bytes of a text in small letters, (length,) int64, with spaces alike, between two ends."""
    end = ByteTokenizer.end
    return torch.tensor([end, *" ".join(text.lower().split()).encode(), end])


class SpeechData(DataModule):
    """Recordings with their texts, as LJ Speech has them: metadata.csv, lines `NAME|text` or `NAME|text|text in words`,
    of which the last is read; and NAME.wav, .flac, .ogg or .mp3, in the folder or below it, of any rate and number of
    channels. The last recordings are the test.

    Args:
        root: the folder.
        rate, window, step, bands: of the spectra, see `MelScale`.
        test: number of recordings of the test. validation: fraction of the others that chooses the best checkpoint; 0:
            none.
        batch_size: recordings in a batch, padded to the longest of it.
        workers: processes that prepare batches.
        input: for predict: a text of which each line that is not blank is spoken, or a folder of texts.
    """

    collate = staticmethod(collate_spoken)

    def __init__(
        self,
        root: str,
        rate: int = 22050,
        window: int = 1024,
        step: int = 256,
        bands: int = 80,
        test: int = 20,
        validation: float = 0.05,
        batch_size: int = 16,
        workers: int = 0,
        input: str | None = None,
    ) -> None:
        super().__init__(root, batch_size, workers, input)
        for name, value in {"rate": rate, "window": window, "step": step, "bands": bands, "test": test}.items():
            check(f"data.{name}", value, value > 0, "1 or more")
        check("data.step", step, 2 * step <= window, f"at most half of window={window}")
        check("data.validation", validation, 0 <= validation < 1, "a fraction below 1")
        self.scale, self.test, self.validation = MelScale(rate, window, step, bands), test, validation
        self.mean, self.deviation = torch.empty(0), torch.empty(0)
        self.lines: list[Line] = []

    def names(self) -> dict[str, list[Any]]:
        """The scale of the spectra, the number of recordings of the test and what spectra are normalised by, after a
        training has begun."""
        if not len(self.mean):
            return {}
        return {"options": self.options(), "mean": self.mean.tolist(), "deviation": self.deviation.tolist()}

    def options(self) -> list[int]:
        """Return rate, window, step, bands and test, which a training and its test share."""
        return [self.scale.rate, self.scale.window, self.scale.step, self.scale.bands, self.test]

    def set_names(self, names: dict[str, list[Any]]) -> None:
        if (options := names["options"]) != self.options():
            log_rank_zero([f"data: rate, window, step, bands and test are the training's, {options}"])
        self.scale, self.test = MelScale(*options[:4]), options[4]
        self.mean, self.deviation = torch.tensor(names["mean"]), torch.tensor(names["deviation"])

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage in ("test", "predict"):
            return  # what spectra are normalised by is that of the training before, or comes with the checkpoint
        learnt, kept = train_and_held_out(self.validation, self._spectra(False))
        fitted = [spectrum.double() for _, spectrum in learnt]
        if not fitted:
            raise DataError(f"{self.root}: validation={self.validation} leaves no recording to train on")
        count = sum(map(len, fitted))
        mean = torch.stack([spectrum.sum(0) for spectrum in fitted]).sum(0) / count
        squares = torch.stack([(spectrum - mean).square().sum(0) for spectrum in fitted]).sum(0) / count
        self.mean, self.deviation = mean.float(), squares.sqrt().clamp(min=1e-3).float()
        self.train_set, self.val_set = self._samples(learnt), self._samples(kept)

    def _spectra(self, tests: bool) -> list[tuple[int, Tensor]]:
        """Read the recordings of the test, or the others, and return their numbers and spectra."""
        self.lines = read_lines(self.root / TABLE)
        if len(self.lines) <= self.test:
            raise DataError(f"{self.root / TABLE}: {len(self.lines)} recordings, expected more than test={self.test}")
        files: dict[str, list[Path]] = {}
        for file in map(Path, list_files(self.root, SOUNDS)):
            files.setdefault(file.stem, []).append(file)
        first = len(self.lines) - self.test
        numbers = range(first, len(self.lines)) if tests else range(first)

        def spectrum(number: int) -> Tensor:
            name, text = self.lines[number]
            if len(paths := files.get(name, [])) != 1:
                counted = " and ".join(map(str, paths)) or "no file"
                raise DataError(f"{self.root}: has {counted} of {name} in {TABLE}, expected one, of any folder below")
            (path,) = paths
            signal, letters = read_audio(path, self.scale.rate)[0], len(letters_of(text))
            frames = 1 + len(signal) // self.scale.step
            if frames < letters or len(signal) <= self.scale.window // 2:
                least = (
                    f"one or more for each of its {letters} letters, and half a window of {self.scale.window} samples"
                )
                raise DataError(f"{path}: {frames} frames, expected {least}")
            return self.scale.spectrum(signal)

        return list(zip(numbers, in_threads(spectrum, numbers, "recordings"), strict=True))

    def _samples(self, spectra: list[tuple[int, Tensor]]) -> list[tuple[Tensor, Tensor, int]]:
        return [
            (letters_of(self.lines[number].text), spectrum.sub_(self.mean).div_(self.deviation), number)
            for number, spectrum in spectra
        ]

    def test_dataloader(self) -> Any:
        if not len(self.mean):
            raise DataError("--ckpt_path: test expects the checkpoint of a training, got none")
        return self.still_loader(self._samples(self._spectra(True)))

    def predict_dataloader(self) -> Any:
        path = Path(self.check_input("a text or a folder of texts to speak", len(self.mean) > 0))
        self.lines = []
        for file, texts in self.read_each(list_files(path), read_texts):
            name = file.relative_to(path).as_posix() if path.is_dir() else file.name
            self.lines += [Line(f"{name}_{number}", text) for number, text in enumerate(texts, 1)]
        empty = torch.zeros(1, self.scale.bands)
        return self.still_loader([(letters_of(line.text), empty, n) for n, line in enumerate(self.lines)])


def read_texts(path: Path) -> list[str]:
    """Return the lines of a text that are not blank. DataError if there is none."""
    with readable(path):
        texts = [text for text in path.read_text("utf-8-sig").splitlines() if text.strip()]
    if not texts:
        raise DataError(f"{path}: is blank, expected a text")
    return texts


def read_lines(path: Path) -> list[Line]:
    """Return the names and texts of a metadata.csv. DataError, with the line, for one that is none."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    with readable(path):
        rows = path.read_text("utf-8-sig").split("\n")
    lines = []
    for number, row in enumerate(rows, 1):
        fields = [field.strip() for field in row.split("|")]
        if row.strip():
            if not 2 <= len(fields) <= 3 or not all((fields[0], fields[-1])):
                raise DataError(f"{path}, line {number}: expected NAME|text or NAME|text|text in words")
            lines.append(Line(fields[0], fields[-1]))
    if not lines:
        raise DataError(f"{path}: has no lines")
    if twice := [name for name, count in Counter(line.name for line in lines).items() if count > 1]:
        raise DataError(f"{path}: names {twice[0]} more than once")
    return lines


class MadeBabble(SpeechData):
    """Made words, see ndlightnet.data.made.babble, which are spoken under `root` if they are not there yet.

    clips: number of recordings, those of the test among them.
    """

    def __init__(self, root: str, clips: int = 420, **kwargs: Any) -> None:
        super().__init__(root, **kwargs)
        check("data.clips", clips, clips > self.test, f"more than test={self.test}")
        self.clips = clips

    def make_data(self) -> None:
        make_babble(self.root, self.clips)
