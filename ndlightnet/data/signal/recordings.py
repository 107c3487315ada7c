"""Recordings of spoken digits, and their spectra: signals of different lengths.

A folder holds files DIGIT_SPEAKER_TAKE.wav, as the Free Spoken Digit Dataset has them, of any rate, depth and number of
channels, which become one channel of 16 bits at 8 kHz; or `audio.flac`, all recordings end to end in one channel, and
`index.npz`: `offsets` (recordings + 1,) in samples, `digit` and `take` (recordings,). Takes 0 to 4 are the test split.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ndlightnet.data.errors import DataError, readable
from ndlightnet.data.signal.sound import read_audio

TEST_TAKES = 5
RATE = 8000  # samples a second, those of the Free Spoken Digit Dataset


@dataclass(frozen=True)
class Recordings:
    """Signals, (samples,) int16 each, with digit and take of each; rate: samples per second."""

    signals: tuple[Tensor, ...]
    digits: tuple[int, ...]
    takes: tuple[int, ...]
    rate: int

    def split(self) -> tuple[list[int], list[int]]:
        """Return the indices of the training and the test recordings, sorted by digit and take."""
        order = sorted(range(len(self.takes)), key=lambda i: (self.digits[i], self.takes[i]))
        train = [i for i in order if self.takes[i] >= TEST_TAKES]
        return train, [i for i in order if self.takes[i] < TEST_TAKES]


def read_recordings(folder: str | Path) -> Recordings:
    """Read all recordings of a folder. DataError names the file that is missing or wrong."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    index = folder / "index.npz"
    if not index.is_file():
        return _separate(folder)
    with readable(index), np.load(index) as file:
        offsets, digits, takes = (file[k].tolist() for k in ("offsets", "digit", "take"))
    if not len(offsets) - 1 == len(digits) == len(takes) > 0:
        raise DataError(
            f"{index}: {len(offsets)} offsets, {len(digits)} digits, {len(takes)} takes: expected "
            "as many digits and takes as recordings, and one offset more"
        )
    sizes = [b - a for a, b in pairwise(offsets)]
    audio, rate = read_audio(folder / "audio.flac")
    if min(sizes) < 1 or offsets[0] < 0 or offsets[-1] > len(audio):
        raise DataError(
            f"{folder / 'audio.flac'}: {len(audio)} samples do not fit the offsets {offsets[0]} to "
            f"{offsets[-1]} of {index.name}, which have to rise"
        )
    signals = audio[offsets[0] : offsets[-1]].split(sizes)
    return Recordings(signals, tuple(digits), tuple(takes), rate)


def _separate(folder: Path) -> Recordings:
    """Read recordings of a file each."""
    paths, labels = sorted(folder.glob("[!.]*.wav")), []
    if not paths:
        raise DataError(f"{folder}: expected files DIGIT_SPEAKER_TAKE.wav, or index.npz and audio.flac")
    for path in paths:
        name = re.fullmatch("([0-9])_.+_([0-9]+)", path.stem)
        if name is None:
            raise DataError(f"{path}: expected a name DIGIT_SPEAKER_TAKE.wav, such as 7_jackson_32.wav")
        labels.append((int(name[1]), int(name[2])))
    digits, takes = zip(*labels, strict=True)
    return Recordings(tuple(read_audio(path, RATE)[0] for path in paths), digits, takes, RATE)


def normalized(signal: Tensor) -> Tensor:
    """Normalise (samples,) int16 to (1, samples) float32 of mean 0 and mean square 1."""
    x = signal.float()[None]
    x = x - x.mean()
    return x / x.square().mean().sqrt().clamp(min=1.0)  # silence stays silence


def augment(x: Tensor, rate: int) -> Tensor:
    """Make a signal (1, samples) louder or softer (up to 6 dB) and faster or slower (up to 10 %),
    and cut off, or add as silence, up to 50 ms at each end."""
    gain, speed, start, end = torch.rand(4).mul(2).sub(1).tolist()
    samples = max(1, round(x.shape[-1] * 1.1**speed))
    x = torch.nn.functional.interpolate(x[None], samples, mode="linear", align_corners=False)[0]
    most = min(0.05 * rate, samples // 4)
    x = torch.nn.functional.pad(x, (round(start * most), round(end * most)))
    return x * 2**gain


def log_spectrum(x: Tensor, window: int, step: int) -> Tensor:
    """Return the logarithm of the magnitudes of a signal's short-time spectra: (1, samples) ->
    (window / 2, frames), one frame every `step` samples. The constant component is left out."""
    shape = torch.hann_window(window)
    spectra = torch.stft(x, window, step, window=shape, center=True, pad_mode="constant", return_complex=True)
    magnitudes = spectra[0, 1:].abs() / math.sqrt(float(shape.square().sum()))
    return torch.log(magnitudes + 0.01) / 2 + 1  # about -1.3 for silence to 1.5 for vowels


class SignalDataset(torch.utils.data.Dataset[tuple[Tensor, int, int]]):
    """Item i is (signal, digit, i) of the recording indices[i].

    A signal is (1, samples) float32, `normalized`; with `train` it is augmented. spectrum: (window,
    step) in samples; then a signal is (window / 2, frames), see `log_spectrum`.
    """

    def __init__(
        self, recordings: Recordings, indices: list[int], train: bool, spectrum: tuple[int, int] | None = None
    ) -> None:
        self.recordings, self.indices = recordings, indices
        self.train, self.spectrum = train, spectrum

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        number = self.indices[index]
        x = normalized(self.recordings.signals[number])
        x = augment(x, self.recordings.rate) if self.train else x
        x = x if self.spectrum is None else log_spectrum(x, *self.spectrum)
        return x, self.recordings.digits[number], index
