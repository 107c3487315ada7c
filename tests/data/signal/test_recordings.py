"""Recordings in one audio file: reading, damage, spectra and augmentation."""

import wave

import numpy as np
import pytest
import torch
from PIL import Image

from ndlightnet.data.signal import recordings
from ndlightnet.data.signal.recordings import SignalDataset, log_spectrum, read_recordings
from ndlightnet.data.signal.sound import read_audio

from ..refusals import refuses


@pytest.fixture
def folder(tmp_path, write_recordings):
    write_recordings(tmp_path / "digits")
    return tmp_path / "digits"


def test_reading_is_lossless_and_the_first_takes_are_the_test(tmp_path, write_recordings):
    written = write_recordings(tmp_path)
    read = read_recordings(tmp_path)
    assert read.rate == 8000 and len(read.signals) == len(written) == 21
    for signal, expected in zip(read.signals, written, strict=True):
        assert signal.dtype == torch.int16 and np.array_equal(signal.numpy(), expected)
    assert read.digits[:4] == (0, 1, 2, 0) and read.takes[:4] == (0, 0, 0, 1)
    train, test = read.split()
    assert sorted(train + test) == list(range(21))
    assert {read.takes[i] for i in test} == {0, 1, 2, 3, 4}
    assert [read.digits[i] for i in train] == [0, 0, 1, 1, 2, 2]


def wav(path, samples, channels=1, width=2, rate=8000):
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(samples)


def test_a_folder_of_40_good_and_bad_sounds(tmp_path, write_flac):
    """Good ones against the wave module, and those that are packed against what was written."""
    rng = np.random.default_rng(0)
    packed = {}
    for rate in (8000, 11025, 16000, 22050, 44100, 48000):
        for length in (1, 99, 5000):
            wav(tmp_path / f"{rate}_{length}.wav", rng.bytes(2 * length), rate=rate)
    for length in (16, 99, 5000, 9000):
        packed[f"{length}.flac"] = rng.integers(-(2**15), 2**15, (1, length)).astype(np.int16)
        write_flac(tmp_path / f"{length}.flac", packed[f"{length}.flac"])
    good = {path.name for path in tmp_path.iterdir()}
    for width in (1, 2, 3, 4):
        for channels in (1, 2):
            if (width, channels) != (2, 1):
                wav(tmp_path / f"{8 * width}bits{channels}.wav", rng.bytes(2400), channels, width)
    write_flac(tmp_path / "stereo.flac", np.ones((2, 5000), np.int16))
    flac = (tmp_path / "5000.flac").read_bytes()
    contents = {"text.wav": b"hello" * 99, "empty.wav": b"", "empty.flac": b"", "head.flac": flac[:30]}
    contents |= {"cut.flac": flac[: len(flac) // 2], "head.wav": (tmp_path / "8000_99.wav").read_bytes()[:30]}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    wav(tmp_path / "silent.wav", b"")
    Image.new("L", (8, 8)).save(tmp_path / "picture.wav", "PNG")
    (tmp_path / "folder.wav").mkdir()
    (tmp_path / "link.wav").symlink_to(tmp_path / "gone")
    files = sorted(tmp_path.iterdir())
    assert len(files) == 40 and len(good) == 22
    for path in files:
        if path.name not in good:
            refuses(lambda path=path: read_audio(path), path)
            continue
        signal, rate = read_audio(path)
        assert signal.dtype == torch.int16
        if path.name in packed:
            assert rate == 8000 and np.array_equal(signal, packed[path.name][0])
            continue
        with wave.open(str(path)) as file:
            assert rate == file.getframerate()
            assert signal.numpy().tobytes() == file.readframes(-1)


def resave(folder, **changes):
    with np.load(folder / "index.npz") as file:
        held = {**file, **changes}
    np.savez(folder / "index.npz", **{k: v for k, v in held.items() if v is not None})


def shorten(path, share):
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def test_a_file_for_each_recording(tmp_path):
    """As the data set has them."""
    signals = {"3_lucas_11": [5, -7, 300] * 2000, "7_theo_0": [1, 2, -32768], "3_lucas_2": [9] * 999}
    for name, samples in signals.items():
        wav(tmp_path / f"{name}.wav", np.array(samples, np.int16).tobytes())
    wav(tmp_path / "8_theo_0.wav", bytes([0, 2, 0, 0, 4, 0]) * 99, 2, 3)  # stereo of 24 bits: 2 and 4 times 256
    signals["8_theo_0"] = [3] * 99
    read = read_recordings(tmp_path)
    assert (read.rate, read.digits, read.takes) == (8000, (3, 3, 7, 8), (11, 2, 0, 0))
    for signal, name in zip(read.signals, sorted(signals), strict=True):
        assert signal.tolist() == signals[name]
    wav(tmp_path / "9_theo_1.wav", np.full(1600, 1000, np.int16).tobytes(), rate=16000)
    signal = read_recordings(tmp_path).signals[-1]
    assert len(signal) == 800 and (signal[50:-50] - 1000).abs().max() <= 1  # but for what the filter does at the ends
    (tmp_path / "9_theo_1.wav").rename(tmp_path / "seven.wav")
    refuses(lambda: read_recordings(tmp_path), tmp_path / "seven.wav", "expected a name DIGIT_SPEAKER_TAKE.wav")


DAMAGE = {
    "no folder": (lambda f, _: f.rename(f.with_name("gone")), r"digits: no such folder"),
    "no audio": (lambda f, _: (f / "audio.flac").unlink(), r"audio.flac: no such file"),
    "no index": (lambda f, _: (f / "index.npz").unlink(), "expected files DIGIT_SPEAKER_TAKE.wav, or index.npz and"),
    "text as audio": (lambda f, _: (f / "audio.flac").write_text("x" * 99), r"audio.flac: "),
    "half of the audio": (lambda f, _: shorten(f / "audio.flac", 0.5), r"audio.flac: "),
    "text as index": (lambda f, _: (f / "index.npz").write_text("x"), r"index.npz: cannot be read"),
    "half of the index": (lambda f, _: shorten(f / "index.npz", 0.5), r"index.npz: cannot be read"),
    "no takes": (lambda f, _: resave(f, take=None), r"index.npz: cannot be read .*take"),
    "few digits": (lambda f, _: resave(f, digit=np.zeros(4)), r"index.npz: .*4 digits"),
    "more offsets": (lambda f, _: resave(f, offsets=np.arange(22) * 9999), r"audio.flac: .*0 to 209979"),
    "falling offsets": (lambda f, _: resave(f, offsets=np.arange(22)[::-1].copy()), r"audio.flac: .*rise"),
    "two channels": (lambda f, write: write(f / "audio.flac", np.ones((2, 30000), np.int16)), "one channel"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_in_one_line(folder, write_flac, damage):
    break_it, words = DAMAGE[damage]
    break_it(folder, write_flac)
    refuses(lambda: read_recordings(folder), None, words)


def test_normalized():
    x = recordings.normalized(torch.tensor([100, 300, 500], dtype=torch.int16))
    assert x.shape == (1, 3) and x.dtype == torch.float32
    assert abs(x.mean()) < 1e-6 and abs(x.square().mean() - 1) < 1e-5
    assert not recordings.normalized(torch.full((4,), 7, dtype=torch.int16)).any()


def test_augmented_signals_differ_by_little():
    x = torch.randn(1, 4000)
    draws = [recordings.augment(x, 8000) for _ in range(50)]
    sizes = [len(y[0]) for y in draws]
    assert min(sizes) >= 4000 / 1.1 - 801 and max(sizes) <= 4400 + 801
    assert len(set(sizes)) > 20
    loudness = torch.stack([y.square().mean().sqrt() for y in draws])
    assert loudness.min() > 0.3 and loudness.max() < 2.1 and loudness.std() > 0.1

    for samples in (1, 2, 7) * 20:  # something of the shortest is left
        y = recordings.augment(torch.ones(1, samples), 8000)
        assert y.shape[-1] >= 1 and y.any()


def test_spectrum_of_a_tone():
    """At 8 kHz, 64 samples tell 125 Hz apart: 1,000 Hz is the eighth, counted from 125 Hz."""
    for samples in (1, 31, 32, 33, 1000):
        assert log_spectrum(torch.randn(1, samples), 64, 32).shape == (32, 1 + samples // 32)
    tone = torch.sin(torch.arange(2000) * 2 * torch.pi * 1000 / 8000)[None]
    spectrum = log_spectrum(2**0.5 * tone, 64, 32)
    assert (spectrum[:, 2:-2].argmax(0) == 7).all()
    assert 1 < spectrum[7, 30] < 2.5 and spectrum[20:, 30].max() < -0.9


@pytest.mark.parametrize("spectrum, channels", [(None, 1), ((64, 32), 32)])
def test_items(folder, spectrum, channels):
    read = read_recordings(folder)
    _, test = read.split()
    still, moving = (SignalDataset(read, test, train=train, spectrum=spectrum) for train in (False, True))
    assert len(still) == len(test)
    for i in (0, 14):
        x, digit, number = still[i]
        assert x.dtype == torch.float32 and x.shape[0] == channels and x.ndim == 2
        assert (digit, number) == (read.digits[test[i]], i)
        assert torch.equal(x, still[i][0])
        augmented = moving[i][0]
        assert augmented.shape[0] == channels
        assert augmented.shape != x.shape or not torch.equal(augmented, x)
