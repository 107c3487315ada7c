"""Files of sound, and the mel spectra of their signals, there and back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ndlightnet.data.errors import DataError, atomic_write, readable

FLOOR = 1e-5  # of a band's magnitude, below which all is silence
SOUNDS = (".wav", ".flac", ".ogg", ".mp3")


def read_audio(path: Path, rate: int | None = None) -> tuple[Tensor, int]:
    """Read a file of one channel of 16 bits: (samples,) int16 and its rate; one of any form if it is to be converted to
    a `rate`, its channels averaged. DataError if it cannot be read, is cut off or has samples that are not numbers."""
    import soundfile
    from torchaudio.functional import resample

    if not path.is_file():
        raise DataError(f"{path}: no such file")
    with readable(path), path.open("rb") as raw:
        # soundfile corrects the length of a WAV file that is cut off; 2**32 - 1 is that of a stream
        head = raw.read(8)
        if head[:4] == b"RIFF" and path.stat().st_size < 8 + int.from_bytes(head[4:], "little") < 2**32:
            raise DataError(f"{path}: is cut off")
    with readable(path), soundfile.SoundFile(path) as file:
        plain, actual, count = file.channels == 1 and file.subtype == "PCM_16", file.samplerate, file.frames
        signal = torch.from_numpy(file.read(dtype="float32", always_2d=True)) * 2**15  # exact for 16 bits
    if not len(signal):
        raise DataError(f"{path}: has no samples")
    if len(signal) < count or not signal.isfinite().all():
        raise DataError(f"{path}: has {len(signal)} of {count} samples, expected all, and numbers")
    if rate is None:
        if not plain:
            raise DataError(f"{path}: expected one channel of 16 bits a sample")
        return signal[:, 0].to(torch.int16), actual
    mono = resample(signal.mean(1), actual, rate)
    return mono.round().clamp(-(2**15), 2**15 - 1).to(torch.int16), rate


def write_audio(path: Path, signal: Tensor, rate: int) -> None:
    """Write a signal (samples,), floats of which -1 to 1 are heard, as a WAV file of 16 bits."""
    import soundfile

    with atomic_write(path) as draft:
        soundfile.write(draft, signal.clamp(-1, 1).cpu().numpy(), rate, "PCM_16", format="WAV")


@dataclass(frozen=True)
class MelScale:
    """How a signal becomes a spectrum: `rate` samples a second; spectra of `window` samples every `step` samples, whose
    magnitudes are summed in `bands` bands, evenly spaced in mel (Slaney's scale, bands of equal area)."""

    rate: int = 22050
    window: int = 1024
    step: int = 256
    bands: int = 80

    @property
    def _bands(self) -> dict[str, Any]:
        return {"n_mels": self.bands, "sample_rate": self.rate, "norm": "slaney", "mel_scale": "slaney"}

    @cached_property
    def _transform(self) -> Any:
        from torchaudio.transforms import MelSpectrogram

        return MelSpectrogram(n_fft=self.window, hop_length=self.step, power=1, **self._bands)

    def spectrum(self, signal: Tensor) -> Tensor:
        """Map a signal (samples,) int16, more than half a window, to the logarithms of its bands' magnitudes, (1 +
        samples / step, bands) float32."""
        bands: Tensor = self._transform(signal.float() / 2**15)
        return bands.clamp(min=FLOOR).log().mT

    def signal(self, spectrum: Tensor) -> Tensor:
        """Return a signal (samples,) float32, `step` for each frame at most, of a spectrum (frames, bands), with phases
        by Griffin and Lim's algorithm."""
        from torchaudio.transforms import GriffinLim, InverseMelScale

        frames, enough = len(spectrum), self.window // (2 * self.step) + 2
        silence = max(0, enough - frames)  # behind a spectrum that is shorter than a window
        spectrum = torch.nn.functional.pad(spectrum, (0, 0, 0, silence), value=math.log(FLOOR))
        magnitudes = InverseMelScale(self.window // 2 + 1, **self._bands)(spectrum.float().cpu().mT.exp())
        signal: Tensor = GriffinLim(self.window, hop_length=self.step, power=1)(magnitudes)
        return signal[: frames * self.step]
