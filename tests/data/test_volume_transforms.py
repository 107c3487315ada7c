"""Transforms between a volume on disk and a network's sample."""

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from monai.data import DataLoader
from monai.transforms import ClassesToIndices
from monai.utils import set_determinism
from pytest import MonkeyPatch

from ndlightnet.data.volume_transforms import augment, invert, preprocess, scale_of, volume_dataset
from ndlightnet.data.volumes import Case, load_case

from .volume_files import SHAPE, random_image, random_label, write


@pytest.fixture(autouse=True)
def same_draws() -> Iterator[None]:
    """MONAI's transforms have generators of their own, seeded when they are composed."""
    set_determinism(0)
    yield
    set_determinism(None)


def test_intensities_by_modality() -> None:
    hu = torch.tensor([-3000.0, -1000, -100, 40, 50, 500, 2000, 9000]).reshape(1, 2, 2, 2)
    ct = scale_of("CT")(hu).flatten()
    assert ct[0] == ct[1] and ct[6] == ct[7] and ct[3] == 0 and (ct[1:7].diff() > 0.09).all()
    suv = scale_of("PET")(torch.tensor([0.0, 2, 20, 80]).reshape(1, 2, 2, 1)).flatten()
    assert suv[0] == 0 and 0.8 < suv[1] < 1 and suv[3] < 5
    for top in (1.0, 1e6):  # MRI has no unit: a factor changes nothing, and one bright voxel little
        mri = torch.from_numpy(random_image((20, 20, 20)))[None] * top
        mri[0, 0, 0, 0] = 1000 * mri.max()
        scaled = scale_of("MRI")(mri)
        assert abs(float(scaled.mean())) < 1e-4 and abs(float(scaled.std()) - 1) < 1e-3
        assert scaled.abs().max() < 4
    assert not torch.isnan(scale_of("MRI")(torch.full((1, 4, 4, 4), 7.0))).any()


def test_prepare_turns_to_ras_and_back(case: Case) -> None:
    loaded = load_case(case)
    prepared = preprocess(["MRI"])(loaded)
    assert prepared["image"].dtype == torch.float32
    assert nibabel.aff2axcodes(prepared["image"].affine.numpy()) == ("R", "A", "S")
    assert torch.equal(prepared["label"][0].as_tensor(), loaded["label"][0].flip(0).as_tensor())
    assert torch.equal(invert(prepared["label"].as_tensor(), prepared), loaded["label"].as_tensor())
    logits = torch.randn(3, *SHAPE)
    assert torch.equal(invert(logits, prepared), logits.flip(1))
    with pytest.raises(ValueError, match="shape"):
        invert(torch.zeros(1, 3, 3, 3), prepared)


def test_stored_axis_order_does_not_matter(tmp_path: Path) -> None:
    """One body, stored in two index orders, is one prepared volume; predictions return to each."""
    voxels, affine = random_image(), np.diag([1.0, 2.0, 3.0, 1.0])
    turned = np.ascontiguousarray(voxels[::-1].transpose(2, 0, 1))
    swap = np.zeros((4, 4))
    swap[[2, 0, 1, 3], [0, 1, 2, 3]] = 1, -1, 1, 1
    swap[0, 3] = SHAPE[0] - 1
    files = write(tmp_path / "a.nii", voxels, affine), tmp_path / "b.nii"
    write(files[1], turned, affine @ swap)
    first, second = (preprocess(["CT"])(load_case(Case("x", (f,), None))) for f in files)
    assert torch.equal(first["image"].as_tensor(), second["image"].as_tensor())
    assert torch.allclose(first["image"].affine, second["image"].affine)
    prediction = torch.arange(voxels.size).reshape(1, *SHAPE)
    back = invert(prediction, second)[0].numpy()
    assert np.array_equal(back, prediction[0].numpy()[::-1].transpose(2, 0, 1))


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (2.2, 1.7, 3.5)])
def test_spacing_and_back(tmp_path: Path, spacing: tuple[float, ...]) -> None:
    label = np.zeros((24, 20, 18), np.uint8)
    label[5:15, 4:16, 6:12] = 1
    label[15:19, 4:16, 6:12] = 2
    image = write(tmp_path / "i.nii.gz", label * np.float32(100))
    prepared = preprocess(["CT"], spacing)(
        load_case(Case("x", (image,), write(tmp_path / "l.nii.gz", label)))
    )
    assert prepared["image"].shape == prepared["label"].shape
    assert prepared["label"].dtype == torch.int16
    assert np.allclose(prepared["image"].pixdim, spacing)
    hot = torch.nn.functional.one_hot(prepared["label"][0].as_tensor().long(), 3).movedim(-1, 0)
    for back in (invert(prepared["label"].as_tensor(), prepared)[0],
                 invert(hot.float(), prepared).argmax(0)):  # fmt: skip
        assert back.shape == label.shape
        for n in (1, 2):
            ours, theirs = back.numpy() == n, label == n
            assert 2 * (ours & theirs).sum() / (ours.sum() + theirs.sum()) > 0.8
    numbers = invert(prepared["label"].as_tensor() * 40, prepared)
    assert numbers.dtype == torch.int16 and set(numbers.unique().tolist()) == {0, 40, 80}


@pytest.fixture
def cases(tmp_path: Path) -> list[Case]:
    found = []
    for i, shape in enumerate([(30, 26, 22), (18, 33, 21), (9, 8, 7)]):
        label = random_label(shape, 2, seed=i)
        label[3, 4, 5] = 3  # one voxel of a class, and none of class 2
        image = random_image(shape, seed=i) + np.float32(500) * label
        found.append(Case(f"c{i}", (write(tmp_path / f"{i}.nii.gz", image),),
                          write(tmp_path / f"l{i}.nii.gz", label)))  # fmt: skip
    return found


def test_augmented_samples(cases: list[Case]) -> None:
    prepare, patch = preprocess(["MRI"]), (16, 20, 24)
    data = volume_dataset(cases, prepare, augment(patch, 3, 4), progress=False)
    rare = 0
    for _ in range(10):
        for case, samples in zip(cases, (data[i] for i in range(len(cases))), strict=True):
            assert len(samples) == 3
            for sample in samples:
                assert set(sample) == {"image", "label", "name"} and sample["name"] == case.name
                image, label = sample["image"], sample["label"]
                assert type(image) is torch.Tensor and image.dtype == torch.float32
                assert type(label) is torch.Tensor and label.dtype == torch.int64
                assert image.shape == label.shape == (1, *patch)
                assert torch.isfinite(image).all() and set(label.unique().tolist()) <= {0, 1, 3}
                rare += bool((label == 3).any())
    # Evenly drawn classes centre 1/3 of the crops on it, and an even draw of voxels would miss it
    # in most of the others; the smallest volume always holds it.
    assert rare > 40
    first, again = ([s["image"] for s in data[0]] for _ in range(2))
    assert not all(map(torch.equal, first, again))


def test_image_and_label_move_together(tmp_path: Path) -> None:
    label = np.zeros((32, 32, 32), np.uint8)
    label[8:20, 10:24, 6:22] = 1
    image = write(tmp_path / "i.nii.gz", label * np.float32(1000) - 300)
    case = Case("x", (image,), write(tmp_path / "l.nii.gz", label))
    data = volume_dataset(
        [case], preprocess(["CT"]), augment((24, 24, 24), 8, 2, (0, 1, 2)), 1, False
    )
    for sample in [s for _ in range(8) for s in data[0]]:
        inside, outside = (sample["image"][sample["label"] == n] for n in (1, 0))
        if len(inside) > 50 and len(outside) > 50:
            assert inside.median() > outside.median() + 1


def test_flips_only_where_asked(tmp_path: Path) -> None:
    ramp = np.broadcast_to(np.arange(16, dtype=np.float32)[:, None, None], (16, 16, 16)).copy()
    case = Case("x", (write(tmp_path / "i.nii.gz", ramp, np.eye(4)),),
                write(tmp_path / "l.nii.gz", random_label((16, 16, 16)), np.eye(4)))  # fmt: skip
    for axes, expected in (((), {True}), ((0,), {True, False}), ((1, 2), {True})):
        steps = augment((16, 16, 16), 4, 3, axes)
        data = volume_dataset([case], preprocess(["MRI"]), steps, 1, progress=False)
        samples = [sample["image"][0] for _ in range(8) for sample in data[0]]
        assert {bool(s[12:].mean() > s[:4].mean()) for s in samples} == expected


def test_without_augmentation_the_volume_is_whole(cases: list[Case]) -> None:
    data = volume_dataset(cases, preprocess(["MRI"]), progress=False)
    assert data[1]["image"].shape == (1, 18, 33, 21) and data[1]["name"] == "c1"
    assert torch.equal(data[1]["image"], data[1]["image"])
    assert torch.equal(invert(data[1]["label"], data[1]), load_case(cases[1])["label"].as_tensor())


def test_the_dataset_reads_each_file_once_and_travels(cases: list[Case]) -> None:
    data = volume_dataset(cases, preprocess(["MRI"]), augment((8, 8, 8), 2, 4), progress=False)
    for case in cases:
        case.images[0].unlink()
    data = pickle.loads(pickle.dumps(data))
    loader = DataLoader(data, batch_size=3, num_workers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (batch,) = list(loader)
    assert batch["image"].shape == batch["label"].shape == (6, 1, 8, 8, 8)
    assert batch["name"] == ["c0", "c0", "c1", "c1", "c2", "c2"]


def test_voxels_of_a_class_are_looked_up_once(cases: list[Case], monkeypatch: MonkeyPatch) -> None:
    """It costs more than all the rest of a sample."""
    look, found = ClassesToIndices.__call__, []

    def counted(*arguments: Any, **options: Any) -> Any:
        found.append(None)
        return look(*arguments, **options)

    monkeypatch.setattr(ClassesToIndices, "__call__", counted)
    data = volume_dataset(cases, preprocess(["MRI"]), augment((8, 8, 8), 2, 4), progress=False)
    for i in (0, 1, 2, 0, 1, 2):
        assert len(data[i]) == 2
    assert len(found) == len(cases)
