"""Grey images and volumes: files of two formats, damage, moves, and batches."""

import gzip
import struct
from itertools import product

import numpy as np
import pytest
import torch

from ndlightnet.data.image.image_sets import Batches, ImageSet, ShuffledBatches, mean_and_std, moved, read_images

from ..refusals import refuses

SPLITS = ("train", "val", "test")
RNG = np.random.default_rng(0)


def idx(array):
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def arrays(count, *space):
    images = RNG.integers(0, 256, (count, *space), dtype=np.uint8)
    return images, RNG.integers(0, 3, count, dtype=np.uint8)


class IdxFolder:
    """The four files, plain or compressed, of 5 images to train with and 3 to test."""

    def __init__(self, folder, ending):
        self.folder, self.ending = folder, ending
        self.written = {"train": arrays(5, 6, 4), "test": arrays(3, 6, 4)}
        for split, (images, labels) in self.written.items():
            self.file(split, "images-idx3").write_bytes(self.pack(idx(images)))
            self.file(split, "labels-idx1").write_bytes(self.pack(idx(labels)))

    def file(self, split, kind):
        name = {"train": "train", "test": "t10k"}[split]
        return self.folder / f"{name}-{kind}-ubyte{self.ending}"

    def pack(self, content):
        return gzip.compress(content) if self.ending else content


@pytest.fixture(params=["", ".gz"])
def idx_folder(request, tmp_path):
    return IdxFolder(tmp_path, request.param)


def write_npz(path, written, **changes):
    content = {}
    for split, (images, labels) in written.items():
        content |= {f"{split}_images": images, f"{split}_labels": labels[:, None]}
    np.savez_compressed(path, **{name: x for name, x in {**content, **changes}.items() if x is not None})
    return path


def same(read, written):
    assert list(read) == [split for split in SPLITS if split in written]
    for split, (images, labels) in written.items():
        assert read[split].images.dtype == torch.uint8 and read[split].labels.dtype == torch.int64
        np.testing.assert_array_equal(read[split].images.numpy(), images)
        np.testing.assert_array_equal(read[split].labels.numpy(), labels)


def test_idx_files(idx_folder):
    same(read_images(idx_folder.folder), idx_folder.written)


@pytest.mark.parametrize("splits", [("train", "test"), SPLITS])
@pytest.mark.parametrize("space", [(3, 5, 2), (6, 3)])  # the second: grey, three columns
def test_npz_file(tmp_path, splits, space):
    written = {split: arrays(4 + i, *space) for i, split in enumerate(splits)}
    same(read_images(write_npz(tmp_path / "x.npz", written)), written)


IMAGES, LABELS = ("test", "images-idx3"), ("test", "labels-idx1")


@pytest.mark.parametrize(
    "kind, damage, words",
    [
        (IMAGES, lambda b: b[:-1], "damaged"),
        (IMAGES, lambda b: b + b"0", "damaged"),
        (IMAGES, lambda b: b"", "damaged"),
        (IMAGES, lambda b: b[:9], "damaged"),
        (IMAGES, lambda b: b"\0\0\x0d" + b[3:], "not bytes in the IDX"),
        (IMAGES, lambda b: b"\0\0\x08\0" + b[4:], "damaged"),
        (LABELS, lambda b: idx(np.zeros(4, np.uint8)), r"test has images \(3, 6, 4\) uint8 and labels \(4,\)"),
    ],
)
def test_idx_files_that_are_damaged_or_do_not_fit(idx_folder, kind, damage, words):
    file, folder = idx_folder.file(*kind), idx_folder.folder
    content = file.read_bytes()
    plain = gzip.decompress(content) if idx_folder.ending else content
    file.write_bytes(idx_folder.pack(damage(plain)))
    refuses(lambda: read_images(folder), file if kind == IMAGES else folder, words)
    if idx_folder.ending:
        file.write_bytes(content[:-9])
        refuses(lambda: read_images(folder), file, "cannot be read")
    file.unlink()
    name = idx_folder.file(*kind).name.removesuffix(".gz")
    refuses(lambda: read_images(folder), folder / name, rf"no such file, nor {name}\.gz")


NONE = {"test_images": np.zeros((0, 4, 4), np.uint8), "test_labels": np.zeros(0, np.uint8)}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"test_labels": None}, r"cannot be read .*test_labels"),
        ({"train_images": None}, r"cannot be read .*train_images"),
        ({"val_images": np.zeros((2, 4, 4), np.float32)}, "val has images .* float32"),
        ({"val_images": np.zeros((2, 4, 5), np.uint8)}, r"val has images \(2, 4, 5\)"),
        ({"val_labels": np.zeros((2, 1))}, "labels .* float64"),
        (NONE, r"test has images \(0, 4, 4\)"),
        ({"train_images": np.zeros((2, 6, 6, 3), np.uint8)}, r"train has images \(2, 6, 6, 3\) .*colour"),
        ({"train_labels": np.array([{}, {}], object)}, "cannot be read"),  # a pickle is not unpacked
    ],
)
def test_an_npz_file_that_does_not_fit(tmp_path, changes, words):
    path = write_npz(tmp_path / "x.npz", {split: arrays(2, 4, 4) for split in SPLITS}, **changes)
    refuses(lambda: read_images(path), path, words)


def test_what_is_no_npz_file(tmp_path):
    (tmp_path / "text.npz").write_text("words")
    np.save(tmp_path / "one.npy", np.zeros(3))
    for name, words in {
        "gone": "no such file or folder",
        "text.npz": "cannot be read",
        "one.npy": "cannot be read",
    }.items():
        refuses(lambda name=name: read_images(tmp_path / name), tmp_path / name, words)


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
    after = moved(images[:, None], shifts, flips)
    assert after.dtype == torch.uint8 and torch.equal(after[:, 0], expected)
    assert not torch.equal(expected, images)


def numbered(count):
    """Images that tell their number, and their numbers as labels."""
    numbers = torch.arange(count)
    return ImageSet(numbers.to(torch.uint8).view(-1, 1, 1).expand(count, 4, 6).clone(), numbers)


def joined(batches):
    return [torch.cat(columns) for columns in zip(*batches, strict=True)]


def test_batches_in_order():
    batches = Batches(numbered(7), 3)
    assert len(batches) == 3 and [len(batch[1]) for batch in batches] == [3, 3, 1]
    images, labels, numbers = joined(batches)
    assert images.shape == (7, 1, 4, 6) and images.dtype == torch.uint8
    assert labels.tolist() == numbers.tolist() == images[:, 0, 2, 3].tolist() == list(range(7))


@pytest.mark.parametrize("count, size, expected", [(10, 3, 3), (9, 3, 3), (2, 3, 1), (3, 3, 1)])
def test_whole_batches_in_random_order(count, size, expected):
    batches = ShuffledBatches(numbered(count), size)
    drawn = list(batches)
    assert len(batches) == len(drawn) == expected
    assert {len(batch[1]) for batch in drawn} == {min(count, size)}
    images, labels, numbers, shifts, flips = joined(drawn)
    assert torch.equal(labels, numbers) and len(labels.unique()) == len(labels)
    assert torch.equal(images[:, 0, 0, 0].long(), labels)  # a label stays with its image
    assert not shifts.any() and not flips.any()


def test_batches_follow_from_seed_and_epoch():
    def drawn(seed, epoch, noise):
        torch.manual_seed(noise)  # as a network of another size would leave it
        batches = ShuffledBatches(numbered(200), 50, shift=2, flips=[1], seed=seed)
        batches.sampler.set_epoch(epoch)
        return joined(batches)

    first = drawn(3, 1, 0)
    assert all(map(torch.equal, drawn(3, 1, 99), first))
    for seed, epoch in ((4, 1), (3, 2)):
        assert not any(map(torch.equal, drawn(seed, epoch, 0), first))
    *_, shifts, flips = first
    assert shifts.shape == flips.shape == (200, 2)
    assert all(set(column.tolist()) == {-2, -1, 0, 1, 2} for column in shifts.T)
    assert not flips[:, 0].any() and 60 < flips[:, 1].sum() < 140  # 5.6 deviations


@pytest.mark.parametrize("count", [20, 23])
def test_processes_share_the_batches(count):
    """Three of them: the same number of training batches each, no image twice, tests complete."""
    moving = [list(ShuffledBatches(numbered(count), 2, (rank, 3), shift=5)) for rank in range(3)]
    assert [len(share) for share in moving] == [3, 3, 3]
    numbers = [n for share in moving for batch in share for n in batch[2].tolist()]
    assert len(numbers) == len(set(numbers)) == 18
    assert not torch.equal(moving[0][0][3], moving[1][0][3])  # other moves
    still = [Batches(numbered(count), 2, (rank, 3)) for rank in range(3)]
    assert all(len(list(share)) == len(share) for share in still)
    assert sorted(n for share in still for b in share for n in b[2].tolist()) == list(range(count))
