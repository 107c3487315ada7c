"""Where a reader may seek, and the decoders that seek beside PyAV."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ndlightnet.data.video.video_decoders as video_decoders
import ndlightnet.data.video.video_files as video
from ndlightnet.data.errors import DataError
from ndlightnet.data.video.video_decoders import Decoder, TorchCodec, decoders
from ndlightnet.data.video.video_files import PyAVReader, SeekingReader, ThinVideo, quickest

from .made_videos import COUNT, OPEN, SEEKING, X264, bars, each_decoder, load, moving_bar, open_video


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of 4 groups of pictures."""
    return moving_bar(tmp_path / "a.mp4", "libx264", X264, None)


@each_decoder
def test_every_frame_is_that_of_decoding_in_order(path: Path, decoder: Decoder) -> None:
    """Asked for one at a time, from the last to the first: each is sought."""
    right = PyAVReader(path).frames(range(COUNT))
    opened = SeekingReader(PyAVReader(path), decoder)
    for number in reversed(range(COUNT)):
        frames = opened.frames([number])
        assert frames.dtype == torch.uint8 and torch.equal(frames, right[number : number + 1])
    assert torch.equal(opened.frames([30, 3, 3, 17]), right[[30, 3, 3, 17]])


@pytest.mark.skipif(not SEEKING, reason="no decoder that seeks is installed")
@pytest.mark.parametrize("wanted", [1, 2, 3, COUNT])
def test_a_reader_seeks_if_it_skips_every_other_group(path: Path, wanted: int) -> None:
    assert isinstance(open_video(path, wanted), SeekingReader) == (wanted <= 2)


@pytest.mark.parametrize("name", ["open.mp4", "open.mkv"])
def test_one_look_where_nothing_moves_is_not_enough(tmp_path: Path, name: str) -> None:
    """What decord shows after its first seek is right, and wrong after the others."""
    opened = open_video(moving_bar(tmp_path / name, "libx264", OPEN, None, still=20), 1)
    assert isinstance(opened, PyAVReader) and bars(opened.frames([25, 13, 38])) == [25, 20, 38]


I, P, CUT = (True, False), (False, False), (False, True)  # (key frame, discarded)


@pytest.mark.parametrize(
    "times, kinds, expected",
    [
        ([0, 2, 1, 3, 5, 4], [I, P, P, I, P, P], [0, 3]),
        ([-1, 0, 7, 9], [I, I, I, P], [0, 1, 2]),
        ([0, 1, 4, 3, 5], [I, P, I, P, P], []),  # 3 is shown before the key frame it follows
        ([0, 2, 1, 3], [I, P, I, P], []),  # 2 is shown after the key frame it precedes
        ([0, 1, 2, 3], [I, CUT, I, P], []),
        ([0, 1, 2, None], [I, P, I, P], []),
    ],
)
def test_where_a_reader_may_seek(times: list[int | None], kinds: list[tuple[bool, bool]], expected: list[int]) -> None:
    assert video._seeks([(time, *kind) for time, kind in zip(times, kinds, strict=True)]) == expected


@each_decoder
@pytest.mark.parametrize("wrong", ["a frame before", "another length", "an error", "a colour"])
def test_what_a_decoder_does_not_read_rightly_is_left_to_pyav(
    path: Path, monkeypatch: pytest.MonkeyPatch, decoder: Decoder, wrong: str
) -> None:
    class Wrong(decoder):
        def __len__(self) -> int:
            return super().__len__() + (wrong == "another length")

        def __getitem__(self, numbers: list[int]) -> torch.Tensor:
            if wrong == "an error":
                raise RuntimeError("no frame")
            found = super().__getitem__([n - (wrong == "a frame before") for n in numbers])
            return found ^ (wrong == "a colour")

    monkeypatch.setattr(video, "decoders", lambda: (decoder,))
    assert isinstance(open_video(path, 1), SeekingReader)
    monkeypatch.setattr(video, "decoders", lambda: (Wrong,))
    opened = open_video(path, 1)
    assert isinstance(opened, PyAVReader) and bars(opened.frames([30, 2])) == [30, 2]


@each_decoder
def test_pyav_takes_over_where_a_decoder_stops(path: Path, monkeypatch: pytest.MonkeyPatch, decoder: Decoder) -> None:
    def stop(*_: object) -> None:
        raise RuntimeError("no frame")

    opened = SeekingReader(PyAVReader(path), decoder)
    monkeypatch.setattr(decoder, "__getitem__", stop)
    assert bars(opened.frames([30, 2])) == [30, 2]


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_torchcodec_without_ffmpeg_is_not_used(monkeypatch, error: type[Exception]) -> None:
    def load(name: str) -> None:
        if name.startswith("torchcodec"):
            raise error("Could not load libtorchcodec")

    monkeypatch.setattr(video_decoders, "import_module", load)
    assert decoders.__wrapped__() == (video_decoders.Decord,)


class Card:
    """A decoder whose card has other colours, by `change` levels; it needs no card."""

    change, opened = 2, 0

    def __init__(self, path: Path, device: str = "cpu") -> None:
        self.reader, self.device = PyAVReader(path), device
        type(self).opened += device == "cuda:0"

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, numbers: list[int]) -> torch.Tensor:
        return self.reader.frames(numbers) + (self.change if self.device == "cuda:0" else 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    card = type("Card", (Card,), {})
    monkeypatch.setattr(video, "decoders", lambda: (card,))
    monkeypatch.setattr(video, "TorchCodec", card)
    return card


def test_a_card_decodes_any_number_of_frames(path: Path, card: Any) -> None:
    """So that the colours of a frame do not depend on how many are wanted."""
    right = PyAVReader(path).frames(range(COUNT))
    for wanted in (1, COUNT):
        opened = quickest(PyAVReader(path), wanted, "cuda:0")
        assert torch.equal(opened.frames(range(COUNT)), right + 2)
    assert card.opened == 2
    assert torch.equal(load(path, [96], 2), right[[10, 30]])  # the CPU is the default
    # the levels are whole numbers, and the size is that of the file: resizing changes nothing
    assert torch.equal(ThinVideo(path, [96], 2, "cuda:0")[:], right[[10, 30]] + 2)


def test_a_card_with_wrong_colours_is_not_used(path: Path, card: Any) -> None:
    card.change = 10
    assert isinstance(quickest(PyAVReader(path), 1, "cuda:0"), PyAVReader)
    with pytest.raises(DataError, match="Card finds other frames"):
        SeekingReader(PyAVReader(path), card, "cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or TorchCodec not in decoders(), reason="needs CUDA, torchcodec")
def test_nvdec_finds_the_frames_of_a_cpu(path: Path) -> None:
    opened = quickest(PyAVReader(path), COUNT, "cuda:0")
    assert isinstance(opened, SeekingReader)
    wanted = [30, 3, 3, 17, *range(COUNT)]
    frames = opened.frames(wanted)
    assert frames.is_cuda and frames.dtype == torch.uint8 and bars(frames.cpu()) == wanted
    right = PyAVReader(path).frames(wanted)
    assert (frames.cpu().float() - right).abs().mean() < video.CLOSE


def test_a_name_that_decoders_cannot_open(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.mp4")
    moving_bar(tmp_path / "a.mp4", "libx264", X264, None).rename(path)
    assert bars(load(path, [96], 2)) == [10, 30]
