"""Made words, spoken by a synthesiser: recordings with their texts, in LJ Speech's layout.

A vowel is a hum with harmonics, loudest near two formants; a consonant is noise in its band, or silence and a click.
Every recording has its own speed, and its pitch falls towards the end.
"""

import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ndlightnet.data.made.drawn_set import draw_once
from ndlightnet.data.signal.sound import write_audio
from ndlightnet.data.threads import in_threads

VERSION = 1  # of the recordings; to be raised when a change gives others for the same arguments
RATE = 16000
VOWELS = {"a": (800, 1200), "e": (500, 1900), "i": (300, 2300), "o": (500, 900), "u": (320, 750)}  # formants, Hz
NOISES = {"s": (4500, 7500), "f": (1500, 7000), "h": (700, 1800)}  # bands, Hz
STOPS = {"t": 3000, "k": 1700, "p": 700}  # of a click, Hz
CONSONANTS = (*NOISES, *STOPS)
SECONDS = {**dict.fromkeys(VOWELS, 0.13), **dict.fromkeys(NOISES, 0.09), **dict.fromkeys(STOPS, 0.06), " ": 0.08}


def make_babble(folder: Path, clips: int = 420, seed: int = 0, progress: bool = True) -> Path:
    """Write metadata.csv, lines NAME|text, and wavs/NAME.wav of 16 kHz; return `folder`. The same arguments give the
    same files, and a set that exists is left as it is. DataError if the folder holds anything else; ValueError for
    fewer than one clip."""
    if clips < 1:
        raise ValueError(f"clips={clips}: expected 1 or more")
    seeds = np.random.SeedSequence(seed).spawn(clips)

    def draw(draft: Path) -> None:
        (draft / "wavs").mkdir()

        def write(number: int) -> str:
            rng, name = np.random.default_rng(seeds[number]), f"babble_{number:04d}"
            text = draw_text(rng)
            write_audio(draft / "wavs" / f"{name}.wav", torch.from_numpy(speak(text, rng)), RATE)
            return f"{name}|{text}\n"

        (draft / "metadata.csv").write_text("".join(in_threads(write, range(clips), "clips", progress, workers=2)))

    return draw_once(folder, {"version": VERSION, "clips": clips, "seed": seed}, draw)


def draw_text(rng: np.random.Generator) -> str:
    """Draw two to four words of one to three syllables."""
    return " ".join(
        "".join(rng.choice(CONSONANTS) + rng.choice([*VOWELS]) for _ in range(rng.integers(1, 4)))
        for _ in range(rng.integers(2, 5))
    )


def speak(text: str, rng: np.random.Generator) -> NDArray[np.float32]:
    """Return a signal (samples,) of such a text."""
    speed, pitch = rng.uniform(0.85, 1.2), rng.uniform(110, 140)
    sizes = [round(RATE * SECONDS[letter] * rng.uniform(0.85, 1.15) / speed) for letter in text]
    turns = np.cumsum(pitch * np.linspace(1.1, 0.85, sum(sizes))) / RATE
    pieces, start = [], 0
    for letter, size in zip(text, sizes, strict=True):
        pieces.append(_letter(letter, turns[start : start + size], rng) * np.sin(np.linspace(0, math.pi, size)) ** 0.5)
        start += size
    return (np.concatenate(pieces) + rng.normal(0, 5e-4, start)).astype(np.float32)


def _letter(letter: str, turns: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    seconds = np.arange(len(turns)) / RATE
    if letter in VOWELS:
        harmonics = np.arange(1, 28)[:, None]
        near = sum(np.exp(-(((harmonics * 125 - formant) / 180) ** 2)) for formant in VOWELS[letter])
        return 0.2 * ((near + 0.02) * np.sin(2 * math.pi * harmonics * turns)).sum(0)
    if letter in NOISES:
        spectrum = np.fft.rfft(rng.normal(0, 0.25, len(turns)))
        hertz, (low, high) = np.fft.rfftfreq(len(turns), 1 / RATE), NOISES[letter]
        return np.fft.irfft(spectrum * ((low < hertz) & (hertz < high)), len(turns))
    if letter in STOPS:
        after = seconds - seconds[-1] / 2
        return 0.6 * (after > 0) * np.exp(-after.clip(0) / 0.004) * np.sin(2 * math.pi * STOPS[letter] * after)
    return np.zeros_like(turns)
