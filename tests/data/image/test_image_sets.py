"""Grey images and volumes: files of two formats, damage, moves, and batches."""

import gzip
import struct
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from ndlightnet.data.errors import DataError
from ndlightnet.data.image.image_sets import Batches, ImageSet, ShuffledBatches, mean_and_std, moved, read_images

NAMES = {"train": "train", "test": "t10k"}
RNG = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def arrays(count: int, *space: int) -> tuple[np.ndarray, np.ndarray]:
    images = RNG.integers(0, 256, (count, *space), dtype=np.uint8)
    return images, RNG.integers(0, 3, count, dtype=np.uint8)


@pytest.fixture(params=["", ".gz"])
def idx_folder(request, tmp_path) -> tuple[Path, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """The four files, plain or compressed, of 5 images to train with and 3 to test."""
    written = {"train": arrays(5, 6, 4), "test": arrays(3, 6, 4)}
    for part, (images, labels) in written.items():
        for array, name in ((images, "images-idx3"), (labels, "labels-idx1")):
            content = idx(array)
            path = tmp_path / f"{NAMES[part]}-{name}-ubyte{request.param}"
            path.write_bytes(gzip.compress(content) if request.param else content)
    return tmp_path, written


def same(found: dict[str, ImageSet], written: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    assert list(found) == [part for part in ("train", "val", "test") if part in written]
    for part, (images, labels) in written.items():
        assert found[part].images.dtype == torch.uint8 and found[part].labels.dtype == torch.int64
        np.testing.assert_array_equal(found[part].images.numpy(), images)
        np.testing.assert_array_equal(found[part].labels.numpy(), labels)


def test_idx_files(idx_folder):
    folder, written = idx_folder
    same(read_images(folder), written)


def write_npz(path: Path, written: dict[str, tuple[np.ndarray, np.ndarray]], **changes) -> Path:
    content = {}
    for part, (images, labels) in written.items():
        content |= {f"{part}_images": images, f"{part}_labels": labels[:, None]}
    np.savez_compressed(path, **{k: v for k, v in {**content, **changes}.items() if v is not None})
    return path


@pytest.mark.parametrize("parts", [("train", "test"), ("train", "val", "test")])
def test_npz_file(tmp_path, parts):
    written = {part: arrays(4 + i, 3, 5, 2) for i, part in enumerate(parts)}
    same(read_images(write_npz(tmp_path / "x.npz", written)), written)


@pytest.mark.parametrize(
    "damage, text",
    [
        (lambda b: b[:-1], "damaged"),
        (lambda b: b + b"0", "damaged"),
        (lambda b: b"", "damaged"),
        (lambda b: b[:9], "damaged"),
        (lambda b: b"\0\0\x0d" + b[3:], "not bytes in the IDX"),
        (lambda b: b"\0\0\x08\0" + b[4:], "damaged"),
    ],
)
def test_a_damaged_idx_file(idx_folder, damage, text):
    folder, _ = idx_folder
    file = next(folder.glob("t10k-images*"))
    content = file.read_bytes()
    gz = file.suffix == ".gz"
    plain = damage(gzip.decompress(content) if gz else content)
    file.write_bytes(gzip.compress(plain) if gz else plain)
    with pytest.raises(DataError, match=text) as caught:
        read_images(folder)
    assert str(caught.value).startswith(f"{file}: ")


def test_idx_files_that_do_not_fit(idx_folder):
    folder, _ = idx_folder
    (file,) = folder.glob("t10k-labels*")
    content = idx(np.zeros(4, np.uint8))
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    with pytest.raises(DataError, match=r"test has images \(3, 6, 4\) uint8 and labels \(4,\)"):
        read_images(folder)
    if file.suffix == ".gz":
        file.write_bytes(file.read_bytes()[:-9])
        with pytest.raises(DataError, match="cannot be read"):
            read_images(folder)
    file.unlink()
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte: no such file, nor t10k"):
        read_images(folder)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"test_labels": None}, r"cannot be read .*test_labels"),
        ({"train_images": None}, r"cannot be read .*train_images"),
        ({"val_images": np.zeros((2, 4, 4), np.float32)}, "val has images .* float32"),
        ({"val_images": np.zeros((2, 4, 5), np.uint8)}, r"val has images \(2, 4, 5\)"),
        ({"val_labels": np.zeros((2, 1))}, "labels .* float64"),
        (
            {"test_images": np.zeros((0, 4, 4), np.uint8), "test_labels": np.zeros(0, np.uint8)},
            r"test has images \(0, 4, 4\)",
        ),
        ({"train_labels": np.array([{}, {}], object)}, "cannot be read"),  # a pickle is not unpacked
    ],
)
def test_an_npz_file_that_does_not_fit(tmp_path, changes, text):
    written = {part: arrays(2, 4, 4) for part in ("train", "val", "test")}
    path = write_npz(tmp_path / "x.npz", written, **changes)
    with pytest.raises(DataError, match=text) as caught:
        read_images(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_colour_is_no_axis_of_space(tmp_path):
    colour = {part: arrays(4, 6, 6, 3) for part in ("train", "val", "test")}
    path = write_npz(tmp_path / "pathmnist.npz", colour)
    with pytest.raises(DataError, match=r"pathmnist.npz: train has images \(4, 6, 6, 3\) .*colour"):
        read_images(path)
    plane = {part: arrays(4, 6, 3) for part in ("train", "test")}  # grey, three columns
    same(read_images(write_npz(tmp_path / "grey.npz", plane)), plane)


def test_what_is_no_npz_file(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        read_images(tmp_path / "gone.npz")
    (tmp_path / "text.npz").write_text("words")
    np.save(tmp_path / "one.npy", np.zeros(3))
    for name in ("text.npz", "one.npy"):
        with pytest.raises(DataError, match="cannot be read"):
            read_images(tmp_path / name)


def test_mean_and_std():
    images = torch.from_numpy(arrays(9, 5, 7)[0])
    expected = (images.double().mean().item(), images.double().std(correction=0).item())
    assert mean_and_std(images) == pytest.approx(expected, rel=1e-12)
    assert mean_and_std(torch.full((2, 3, 3), 7, dtype=torch.uint8)) == (7, 1)


@pytest.mark.parametrize("space", [(5, 7), (3, 4, 2), (2, 3, 1, 4)])
def test_moves_cell_by_cell(space):
    """Against the definition: mirrored, then `shift` cells later, 0 where nothing came from."""
    images = torch.from_numpy(arrays(6, *space)[0])
    shifts = torch.randint(-3, 4, (6, len(space)))
    flips = torch.rand(6, len(space)) < 0.5
    expected = torch.zeros_like(images)
    for n, cell in product(range(6), product(*map(range, space))):
        source = [at - int(by) for at, by in zip(cell, shifts[n], strict=True)]
        if all(0 <= at < size for at, size in zip(source, space, strict=True)):
            source = [size - 1 - at if flip else at for at, size, flip in zip(source, space, flips[n], strict=True)]
            expected[(n, *cell)] = images[(n, *source)]
    found = moved(images[:, None], shifts, flips)
    assert found.dtype == torch.uint8 and torch.equal(found[:, 0], expected)
    assert not torch.equal(expected, images)


def numbered(count: int) -> ImageSet:
    """Images that tell their number, and their numbers as labels."""
    numbers = torch.arange(count)
    return ImageSet(numbers.to(torch.uint8).view(-1, 1, 1).expand(count, 4, 6).clone(), numbers)


def test_batches_in_order():
    batches = Batches(numbered(7), 3)
    found = list(batches)
    assert len(batches) == 3 and [len(batch[1]) for batch in found] == [3, 3, 1]
    images, labels, numbers = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert images.shape == (7, 1, 4, 6) and images.dtype == torch.uint8
    assert labels.tolist() == numbers.tolist() == list(range(7))
    assert images[:, 0, 2, 3].tolist() == list(range(7))


@pytest.mark.parametrize("count, size, expected", [(10, 3, 3), (9, 3, 3), (2, 3, 1), (3, 3, 1)])
def test_whole_batches_in_random_order(count, size, expected):
    batches = ShuffledBatches(numbered(count), size)
    found = list(batches)
    assert len(batches) == len(found) == expected
    assert {len(batch[1]) for batch in found} == {min(count, size)}
    images, labels, numbers, shifts, flips = (torch.cat(p) for p in zip(*found, strict=True))
    assert torch.equal(labels, numbers) and len(labels.unique()) == len(labels)
    assert torch.equal(images[:, 0, 0, 0].long(), labels)  # a label stays with its image
    assert not shifts.any() and not flips.any()


def test_batches_follow_from_seed_and_epoch():
    def drawn(seed: int, epoch: int, noise: int) -> list[torch.Tensor]:
        torch.manual_seed(noise)  # as a network of another size would leave it
        batches = ShuffledBatches(numbered(200), 50, shift=2, flips=[1], seed=seed)
        batches.sampler.set_epoch(epoch)
        return [torch.cat(parts) for parts in zip(*batches, strict=True)]

    first = drawn(3, 1, 0)
    for same_again, expected in zip(drawn(3, 1, 99), first, strict=True):
        assert torch.equal(same_again, expected)
    for other in (drawn(4, 1, 0), drawn(3, 2, 0)):
        assert all(not torch.equal(a, b) for a, b in zip(other, first, strict=True))
    *_, shifts, flips = first
    assert shifts.shape == flips.shape == (200, 2)
    assert all(set(column.tolist()) == {-2, -1, 0, 1, 2} for column in shifts.T)
    assert not flips[:, 0].any() and 60 < flips[:, 1].sum() < 140  # 5.6 deviations


@pytest.mark.parametrize("count", [20, 23])
def test_processes_share_the_batches(count):
    """Three of them: the same number of training batches each, no image twice, tests complete."""
    moving = [list(ShuffledBatches(numbered(count), 2, (rank, 3), shift=5)) for rank in range(3)]
    assert [len(one) for one in moving] == [3, 3, 3]
    shown = [n for one in moving for batch in one for n in batch[2].tolist()]
    assert len(shown) == len(set(shown)) == 18
    assert not torch.equal(moving[0][0][3], moving[1][0][3])  # other moves
    still = [Batches(numbered(count), 2, (rank, 3)) for rank in range(3)]
    assert all(len(list(one)) == len(one) for one in still)
    assert sorted(n for one in still for b in one for n in b[2].tolist()) == list(range(count))
