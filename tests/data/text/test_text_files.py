"""Reading a file of bytes, splitting it, and windows of it."""

import gzip
import lzma
from collections import Counter

import pytest
import torch

from ndlightnet.data.sampling import SeededSamples
from ndlightnet.data.text.text_files import RandomWindows, Windows, read_bytes, split
from ndlightnet.training.core.data_module import DataModule

from ..refusals import refuses

CONTENT = bytes(range(256)) * 3 + b"and the rest\n"


@pytest.mark.parametrize(
    "name, pack", [("a.txt", bytes), ("a", bytes), ("a.txt.gz", gzip.compress), ("a.xz", lzma.compress)]
)
def test_every_byte_is_read(tmp_path, name, pack):
    (tmp_path / name).write_bytes(pack(CONTENT))
    text = read_bytes(tmp_path / name)
    assert (text.dtype, text.shape) == (torch.uint8, (len(CONTENT),))
    assert bytes(text.tolist()) == CONTENT


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.gz", CONTENT, "cannot be read"),
        ("a.gz", gzip.compress(CONTENT, mtime=0)[:-20], "cannot be read"),
        ("a.gz", gzip.compress(CONTENT, mtime=0)[:30] + b"?" * 30, "cannot be read"),
        ("a.xz", CONTENT, "cannot be read"),
        ("a.xz", lzma.compress(CONTENT)[:-20], "cannot be read"),
        ("a.txt", b"", "is empty"),
        ("a.gz", gzip.compress(b"", mtime=0), "is empty"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    refuses(lambda: read_bytes(tmp_path / name), tmp_path / name, message)


def test_what_is_no_file(tmp_path):
    for path in (tmp_path / "none.xz", tmp_path):
        refuses(lambda path=path: read_bytes(path), path, "no such file$")


@pytest.mark.parametrize("fractions", [(0.9, 0.05, 0.05), (0.9, 0.0, 0.1), (0.7, 0.1, 0.2)])
def test_split_is_of_the_text_in_order(fractions):
    """The sum of the last is 1 - 1e-16 in floats."""
    text = torch.arange(180, dtype=torch.uint8)
    shares = split(text, fractions)
    assert torch.equal(torch.cat(shares), text)
    for length, pieces in ((180, shares), (10**8, split(torch.zeros(1, dtype=torch.uint8).expand(10**8), fractions))):
        assert [len(piece) for piece in pieces] == [round(length * fraction) for fraction in fractions]
    for wrong in ((0.9, 0.1), (0.9, 0.1, 0.1), (1.1, -0.1, 0.0)):
        refuses(lambda wrong=wrong: split(text, wrong), None, r"^fractions=\(.*add up to 1$")


def test_random_windows_are_pieces_of_equal_parts():
    text, length, count = torch.arange(100, dtype=torch.uint8), 9, 7
    windows = RandomWindows(text, length, count)
    assert len(windows) == count
    starts = Counter()
    for _ in range(400):
        for i in range(count):
            window = windows[i]
            assert (window.dtype, window.shape) == (torch.uint8, (length + 1,))
            first = int(window[0])
            assert window.tolist() == list(range(first, first + length + 1))
            # starts 0 to 90 are 91 places, 13 in each part
            assert 13 * i <= first < 13 * (i + 1)
            starts[first] += 1
    assert set(starts) == set(range(91))
    # 2,800 draws of 91 places: each 30.8 times on average, 5.3 the deviation
    assert max(starts.values()) < 60


def test_more_random_windows_than_places():
    text = torch.arange(12, dtype=torch.uint8)
    starts = [int(window[0]) for window in map(RandomWindows(text, 9, 50).__getitem__, range(50))]
    assert starts == sorted(starts) and Counter(starts) == {0: 17, 1: 17, 2: 16}


@pytest.mark.parametrize("workers", [0, 2])
def test_seeds(workers):
    """The same from the same seed, others in another epoch, and others in every part."""
    text, count = torch.randint(256, (50_000,), dtype=torch.uint8), 8

    def epochs(seed):
        windows = SeededSamples(RandomWindows(text, 30, count), seed)
        loader = DataModule(".", 1, workers).training_loader(windows, count)
        windows_of_epochs = []
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            windows_of_epochs.append(torch.cat(list(loader)))
        return windows_of_epochs

    first, again, reseeded = epochs(1), epochs(1), epochs(2)
    for a, b in zip(first, again, strict=True):
        assert a.shape == (count, 31) and torch.equal(a, b)
    # where in its part a window starts: 8 draws of 6,246 places, 2 alike once in 220 times
    starts = [
        sorted(int((text.unfold(0, 31, 1) == window).all(1).nonzero()[0]) for window in windows)
        for windows in (first[0], first[1], reseeded[0])
    ]
    places = [[start - i * (len(text) - 30) // count for i, start in enumerate(one)] for one in starts]
    assert all(0 <= place < 6247 for one in places for place in one)
    assert len(set(places[0])) > 6
    for one in places[1:]:
        assert len({*one} & {*places[0]}) < 2


@pytest.mark.parametrize("length", [1, 4, 9, 29])
def test_windows_predict_every_byte_but_the_first_once(length):
    text = torch.arange(30, dtype=torch.uint8)
    windows = Windows(text, length)
    items = [windows[i] for i in range(len(windows))]
    assert [number for _, number in items] == list(range(29 // length))
    assert all(window.shape == (length + 1,) for window, _ in items)
    predicted = torch.cat([window[1:] for window, _ in items]).tolist()
    assert predicted == list(range(1, 1 + length * len(items)))
    assert torch.cat([window[:-1] for window, _ in items]).tolist() == list(range(length * len(items)))
    assert len(Windows(text[:length], length)) == len(Windows(text[:0], length)) == 0
