"""Made words: letters and their times, the same arguments give the same sounds."""

import numpy as np
import pytest

from ndlightnet.data.errors import DataError
from ndlightnet.data.made.babble import NOISES, RATE, SECONDS, VOWELS, draw_text, make_babble, speak


def loudest(letter: str, low: float, high: float) -> float:
    """The share of a letter's energy between two frequencies."""
    power = np.abs(np.fft.rfft(speak(letter, np.random.default_rng(0)))) ** 2
    hertz = np.fft.rfftfreq(2 * len(power) - 2, 1 / RATE)
    return float(power[(low <= hertz) & (hertz <= high)].sum() / power.sum())


def test_letters_sound_where_they_should():
    for letter, (low, high) in NOISES.items():
        assert loudest(letter, low - 100, high + 100) > 0.9
    for letter, (first, second) in VOWELS.items():
        near = loudest(letter, first - 350, first + 350) + loudest(letter, max(first + 350, second - 350), second + 350)
        assert near > 0.9
    silence = speak(" ", np.random.default_rng(0))
    assert abs(silence).max() < 0.01 < abs(speak("t", np.random.default_rng(0))).max()


def test_a_text_has_words_and_its_sound_their_length():
    rng = np.random.default_rng(0)
    for _ in range(50):
        text = draw_text(rng)
        assert 2 <= len(text.split()) <= 4 and set(text) <= set(SECONDS)
        size, seconds = len(speak(text, rng)) / RATE, sum(SECONDS[letter] for letter in text)
        assert seconds * 0.85 / 1.2 - 0.01 <= size <= seconds * 1.15 / 0.85 + 0.01


def test_sets_are_made_once(tmp_path):
    sets = [make_babble(tmp_path / str(number), 5, progress=False) for number in range(2)]
    assert make_babble(sets[0], 5) == sets[0]
    names = sorted(path.relative_to(sets[0]) for path in sets[0].rglob("*.*"))
    assert len(names) == 7
    for name in names:
        assert (sets[0] / name).read_bytes() == (sets[1] / name).read_bytes()
    assert len({line.split("|")[1] for line in (sets[0] / "metadata.csv").read_text().splitlines()}) == 5
    with pytest.raises(DataError, match="drawn with other arguments"):
        make_babble(sets[0], 6)
    with pytest.raises(ValueError, match="clips=0: expected 1 or more"):
        make_babble(tmp_path / "new", 0)
