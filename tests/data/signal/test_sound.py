"""Sounds: mel spectra there and back, files of other rates, WAV files."""

import math
import wave

import numpy as np
import pytest
import soundfile
import torch

from ndlightnet.data.errors import DataError
from ndlightnet.data.signal.sound import FLOOR, MelScale, read_audio, write_audio


def tone(hertz: float, seconds: float, rate: int) -> np.ndarray:
    return np.sin(2 * math.pi * hertz * np.arange(int(seconds * rate)) / rate)


def test_a_tone_is_loudest_in_its_band():
    scale = MelScale(16000, 1024, 200, 40)
    signal = torch.from_numpy((tone(1000, 0.5, 16000) * 2**13).astype(np.int16))
    spectrum = scale.spectrum(signal)
    assert spectrum.shape == (8000 // 200 + 1, 40) and spectrum.dtype == torch.float32
    # Slaney's scale is linear to 1 kHz, which is 15 mel, and logarithmic above: 27 per factor 6.4
    most = 15 + math.log(8) * 27 / math.log(6.4)
    assert abs(int(spectrum[20].argmax()) + 1 - 41 * 15 / most) <= 1
    assert scale.spectrum(torch.zeros(4000, dtype=torch.int16)).eq(math.log(FLOOR)).all()
    louder = scale.spectrum(2 * signal)[20].max() - spectrum[20].max()
    assert float(louder) == pytest.approx(math.log(2), abs=1e-3)


def test_a_signal_comes_back_with_its_spectrum():
    torch.manual_seed(0)
    scale = MelScale(16000, 1024, 200, 80)
    sound = tone(220, 0.6, 16000) + tone(1760, 0.6, 16000)
    spectrum = scale.spectrum(torch.from_numpy((sound * 2**13).astype(np.int16)))
    signal = scale.signal(spectrum)
    assert len(signal) == (len(spectrum) - 1) * 200
    again = scale.spectrum((signal * 2**15).clamp(-(2**15), 2**15 - 1).short())
    loud = spectrum > spectrum.max() - 3  # within 26 dB of the loudest
    assert (again - spectrum)[loud].abs().mean() < 0.5


@pytest.mark.parametrize("ending, kind", [("ogg", "VORBIS"), ("flac", "PCM_24"), ("wav", "FLOAT"), ("mp3", None)])
def test_files_of_any_kind(tmp_path, ending, kind):
    path = tmp_path / f"a.{ending}"
    soundfile.write(path, np.stack([0.5 * tone(300, 0.5, 22050)] * 2, 1), 22050, kind)
    signal, rate = read_audio(path, 16000)
    assert rate == 16000 and signal.dtype == torch.int16 and abs(len(signal) - 8000) <= 1200  # mp3 pads
    spectrum = np.abs(np.fft.rfft(signal[1000:7000].double().numpy()))
    assert spectrum.argmax() == pytest.approx(300 * 6000 / 16000, abs=1)
    with pytest.raises(DataError, match=r"expected one channel of 16 bits"):
        read_audio(path)


def test_files_that_are_written(tmp_path):
    write_audio(tmp_path / "new" / "a.wav", torch.tensor([0.0, 0.5, -1.0, 3.0]), 8000)
    with wave.open(str(tmp_path / "new" / "a.wav")) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (8000, 1, 2)
        samples = np.frombuffer(file.readframes(4), np.int16)
    assert abs(samples.astype(int) - [0, 2**14, -(2**15), 2**15 - 1]).max() <= 1
    assert read_audio(tmp_path / "new" / "a.wav")[0].tolist() == samples.tolist()


def test_what_is_not_whole_is_refused(tmp_path):
    path = tmp_path / "a.wav"
    write_audio(path, torch.rand(8000), 8000)
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(DataError, match=r"a.wav: is cut off"):
        read_audio(path)
    content = bytearray(path.read_bytes())
    content[4:8] = content[40:44] = b"\xff" * 4  # as written to a pipe, which tells no length
    path.write_bytes(content)
    assert len(read_audio(path)[0]) == (9000 - 44) // 2
    soundfile.write(path, np.full(100, np.nan), 8000, "FLOAT")
    with pytest.raises(DataError, match=r"a.wav: has 100 of 100 samples, expected all, and numbers"):
        read_audio(path, 8000)


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 9])
def test_spectra_that_are_shorter_than_a_window(frames):
    scale = MelScale(16000, 1024, 200, 40)
    signal = scale.signal(torch.zeros(frames, 40))
    assert (frames - 1) * 200 <= len(signal) <= frames * 200 and signal.isfinite().all()
