"""The film of a file: chosen among streams, its pixels made square, turned and mirrored as the file
says, by every reader."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import ndlightnet.data.video.video_files as video
from ndlightnet.data.signal.sound import read_audio
from ndlightnet.data.video.film import Display
from ndlightnet.data.video.video_decoders import Decoder, decoders
from ndlightnet.data.video.video_files import PyAVReader, Sample, SeekingReader, check_videos, quickest
from ndlightnet.data.video.video_stream import VideoStream

from ..refusals import refuses
from .made_videos import MATRICES, as_shown, decoded, each_decoder, encode, jpeg, pour, remux, set_matrix, write_film

ASPECTS = [Fraction(1), Fraction(3), Fraction(8, 9), Fraction(1, 2)]


def pictures(frames: int = 6, height: int = 32, width: int = 96) -> np.ndarray:
    """Coloured blocks of 16 pixels."""
    blocks = np.random.default_rng(0).integers(0, 256, (frames, height // 16, width // 16, 3))
    return blocks.astype(np.uint8).repeat(16, 1).repeat(16, 2)


def streamed(path: Path) -> torch.Tensor:
    return torch.stack([frame.picture for frame in VideoStream(path)])


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[Fraction, Path]:
    """A film of three groups of pictures for each aspect of its pixels."""
    folder = tmp_path_factory.mktemp("sources")
    options = {"g": "2", "bf": "0", "qp": "10"}
    films = enumerate(ASPECTS)
    return {a: write_film(folder / f"{n}.mp4", pictures(), options=options, aspect=a) for n, a in films}


@pytest.mark.parametrize("aspect", ASPECTS, ids=str)
@pytest.mark.parametrize("matrix", MATRICES, ids=str)
def test_every_reader_shows_a_film_as_its_file_says(
    tmp_path: Path, sources: dict[Fraction, Path], matrix: tuple[int, ...], aspect: Fraction
) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(sources[aspect].read_bytes())
    right = as_shown(decoded(set_matrix(path, matrix)), matrix, aspect).astype(int)
    reader = PyAVReader(path)
    readers = [reader, *(SeekingReader(reader, decoder) for decoder in decoders())]
    shown = [streamed(path), *(reader.frames(range(6)) for reader in readers)]
    for frames in shown:
        assert frames.dtype == torch.uint8 and frames.shape == right.shape
        assert np.abs(frames.numpy() - right).max() <= (aspect != 1)  # of the last digit
        assert torch.equal(frames, shown[0])
    assert torch.equal(reader.frames([4, 1]), shown[0][[4, 1]])


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("quarters", range(4))
def test_the_orientations_of_matroska_in_files_and_pipes(tmp_path: Path, quarters: int, mirror: bool) -> None:
    """Anticlockwise, as numpy does."""
    path = write_film(tmp_path / "a.mkv", pictures(30), rotation=(90 * quarters, mirror), sound=True, cover=jpeg())
    right = np.rot90(decoded(path), quarters, axes=(1, 2))[:, :, :: -1 if mirror else 1]
    writer = pour(path.read_bytes(), tmp_path / "pipe")
    for frames in (streamed(tmp_path / "pipe"), PyAVReader(path).frames(range(30))):
        assert torch.equal(frames, torch.from_numpy(right.copy()))
    writer.join(20)


@each_decoder
def test_frames_that_look_alike_in_two_orientations_prove_no_decoder(tmp_path: Path, decoder: Decoder) -> None:
    """Decoders ignore mirrors, which cannot be seen in the dark that a film begins with."""
    film = pictures(8)
    film[:4] = 0
    path = set_matrix(encode(tmp_path / "a.mp4", film, g="2"), (-1, 0, 0, 1))
    right = torch.from_numpy(decoded(path)[:, :, ::-1].copy())
    refuses(lambda: SeekingReader(PyAVReader(path), decoder), path, f"{decoder.__name__} finds other frames")
    assert torch.equal(quickest(PyAVReader(path), 1).frames(range(8)), right)


def test_a_tag_that_only_decord_follows(tmp_path: Path) -> None:
    film = pictures(8)
    film[:4] = 0
    source = encode(tmp_path / "a.mp4", film, g="2")
    path = remux(source, tmp_path / "a.mkv", rotate="180")
    frames = quickest(PyAVReader(path), 1).frames(range(8))
    assert torch.equal(frames, torch.from_numpy(decoded(source)))


def test_a_decoder_that_turns_nothing_is_turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Still:
        def __init__(self, path: Path, device: str = "cpu") -> None:
            self.frames = torch.from_numpy(decoded(path))

        def __len__(self) -> int:
            return len(self.frames)

        def __getitem__(self, numbers: list[int]) -> torch.Tensor:
            return self.frames[numbers]

    monkeypatch.setattr(video, "decoders", lambda: (Still,))
    path = set_matrix(encode(tmp_path / "a.mp4", pictures(), g="2"), (0, 1, 1, 0))
    opened = quickest(PyAVReader(path), 1)
    assert isinstance(opened, SeekingReader)
    assert torch.equal(opened.frames([5, 0]), PyAVReader(path).frames([5, 0]))


@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("degrees", [-180, -90, 0, 90, 180])
def test_both_ways_in_which_a_frame_says_how_it_is_turned(degrees: int, matrix: bool) -> None:
    """Its display matrix, and where PyAV cannot read that, its rotation: anticlockwise, in degrees."""
    turn = np.radians(degrees)
    a, b, c, d = (round(65536 * value) for value in (np.cos(turn), -np.sin(turn), np.sin(turn), np.cos(turn)))

    class Frame:
        rotation = degrees

        @property
        def side_data(self) -> dict[str, bytes]:
            if not matrix:
                raise ValueError("31 is not a valid Type")
            return {"DISPLAYMATRIX": np.array([a, b, 0, c, d, 0, 0, 0, 1 << 30], np.int32).tobytes()}

    frames = torch.from_numpy(pictures(1))
    display = Display().oriented(Frame(), "a.mp4")
    assert torch.equal(display(frames), torch.rot90(frames, degrees // 90, (1, 2)))


@pytest.mark.parametrize("cover", [jpeg(), b"no picture"])
def test_sound_with_a_cover_is_a_good_sound(tmp_path: Path, cover: bytes) -> None:
    signal, rate = read_audio(write_film(tmp_path / "a.flac", pictures(0), sound=True, cover=cover))
    assert (len(signal), rate, signal.dtype) == (4096, 8000, torch.int16)


NEITHER, BOTH = (0, 0), (1, 1)
FLAGS = [("mp4", (1, 0)), ("mp4", (0, 1)), ("mp4", BOTH), ("mkv", (1, 0)), ("mkv", BOTH), ("mkv", NEITHER)]


@pytest.mark.parametrize("ending, default", FLAGS)
def test_of_several_films_the_default_one_else_the_largest(
    tmp_path: Path, ending: str, default: tuple[int, int]
) -> None:
    """The second one is the largest."""
    films, taken = (pictures(6, 32, 96), 255 - pictures(7, 48, 112)), int(default != (1, 0))
    path = write_film(tmp_path / f"a.{ending}", films[0], second=films[1], default=default, options={"g": "2"})
    right = torch.from_numpy(decoded(path, taken))
    opened = quickest(PyAVReader(path), 1)
    size = f"{right.shape[2]} x {right.shape[1]}"
    note = f"{path}: 2 video streams, the one read is stream {taken} ({size} pixels)"
    assert opened.notes == VideoStream(path).notes == check_videos([Sample(path, 0)]) == [note]
    assert torch.equal(opened.frames(range(len(opened))), right)
    assert torch.equal(streamed(path), right)


def test_many_notes_are_few_lines(tmp_path: Path) -> None:
    for number in range(5):
        write_film(tmp_path / f"{number}.mkv", pictures(2), second=pictures(1))
    notes = check_videos([Sample(path, 0) for path in sorted(tmp_path.iterdir())])
    assert [note.split(":")[0] for note in notes[:3]] == [f"{tmp_path}/{n}.mkv" for n in range(3)]
    assert notes[3:] == ["2 more notes on videos are like these"]
