"""NRRD and MetaImage, and what is decided for the user: axes, affines, NaN; memory."""

import gzip
import tracemalloc
from pathlib import Path

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk

from ndlightnet.data.errors import DataError
from ndlightnet.data.volume import file_grid as grid
from ndlightnet.data.volume.datasets import find_inputs
from ndlightnet.data.volume.file_grid import SLAB, Case
from ndlightnet.data.volume.formats import ENDINGS, PICTURES, READERS, reader_of, stem
from ndlightnet.data.volume.volume import Volume

from .files import AFFINE, HU, SHAPE, load, random_image, random_label, read_all, refuses, write, write_series


def write_itk(path: Path, voxels: np.ndarray, affine: np.ndarray = AFFINE) -> Path:
    """voxels (x, y, z[, channels]) by SimpleITK, placed by an affine to RAS mm."""
    image = sitk.GetImageFromArray(
        voxels.T if voxels.ndim == 3 else np.moveaxis(voxels.T, 0, -1), isVector=voxels.ndim == 4
    )
    lps = np.diag([-1, -1, 1, 1]) @ affine
    edges = np.linalg.norm(lps[:3, :3], axis=0)
    image.SetSpacing(edges.tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    image.SetDirection((lps[:3, :3] / edges).ravel().tolist())
    sitk.WriteImage(image, str(path))
    return path


# ---------------------------------------------------------------------------- NRRD and MetaImage


@pytest.mark.parametrize("ending", [".nrrd", ".mha", ".mhd", ".NRRD"])
def test_itk_files(tmp_path: Path, ending: str) -> None:
    path = write_itk(tmp_path / f"scan{ending.lower()}", HU.astype(np.int16))
    path = path.rename(tmp_path / f"scan{ending}")
    (case,) = find_inputs(tmp_path)
    label = write_itk(tmp_path / "label.nrrd", random_label())
    assert case == Case("scan", (path,), None)
    read_all([Case("scan", (path,), label)], 3, 1)
    loaded = Volume.read(Case("scan", (path,), label))
    np.testing.assert_array_equal(loaded.image[0], HU)
    np.testing.assert_array_equal(loaded.label[0], random_label())
    np.testing.assert_allclose(loaded.image.affine, AFFINE, atol=1e-9)
    assert loaded.notes == ()
    # By another route: ITK's own way from an index to a place, and ITK reading what we wrote.
    image = sitk.ReadImage(str(path))
    for index in ((0, 0, 0), (8, 0, 3), (2, 6, 10)):
        place = np.array(image.TransformIndexToPhysicalPoint(index)) * [-1, -1, 1]
        np.testing.assert_allclose((loaded.image.affine.numpy() @ [*index, 1])[:3], place)
    Volume.read(case).save_labels(random_label(), tmp_path / "out" / "scan.nii.gz")
    saved = sitk.ReadImage(str(tmp_path / "out" / "scan.nii.gz"))
    np.testing.assert_array_equal(sitk.GetArrayFromImage(saved).T, random_label())
    np.testing.assert_allclose(saved.GetOrigin(), image.GetOrigin(), atol=1e-4)
    np.testing.assert_allclose(saved.GetSpacing(), image.GetSpacing(), rtol=1e-6)
    np.testing.assert_allclose(saved.GetDirection(), image.GetDirection(), atol=1e-6)


def test_itk_channels_planes_and_a_nrrd_without_space(tmp_path: Path) -> None:
    voxels = random_image((*SHAPE, 3))
    image = load(write_itk(tmp_path / "vector.nrrd", voxels)).image
    np.testing.assert_array_equal(image, np.moveaxis(voxels, -1, 0))
    np.testing.assert_allclose(image.affine, AFFINE, atol=1e-9)
    fourth = sitk.JoinSeries([sitk.GetImageFromArray(voxels[..., c].T) for c in range(3)])
    sitk.WriteImage(fourth, str(tmp_path / "series.mha"))
    np.testing.assert_array_equal(load(tmp_path / "series.mha").image, image)

    plane = sitk.GetImageFromArray(voxels[:, :, 0, 0].T)
    plane.SetSpacing((2.0, 3.0))
    sitk.WriteImage(plane, str(tmp_path / "plane.mha"))
    loaded = load(tmp_path / "plane.mha")
    np.testing.assert_array_equal(loaded.image, voxels[None, :, :, :1, 0])
    np.testing.assert_allclose(loaded.image.affine, np.diag([-2.0, -3.0, 1, 1]))
    assert loaded.notes == (f"{tmp_path / 'plane.mha'}: is a plane, taken as one slice of 1 mm",)

    bare = tmp_path / "bare.nrrd"
    bare.write_text(
        "NRRD0004\ntype: short\ndimension: 3\nsizes: 3 1 2\nspacings: 1 2 3\nencoding: ascii\n\n1 2 3 4 5 6\n"
    )
    loaded = load(bare)
    np.testing.assert_array_equal(loaded.image[0], np.reshape([1, 4, 2, 5, 3, 6], (3, 1, 2)))
    assert loaded.notes == (f"{bare}: has no field 'space': left and right are not known",)


def test_what_itk_says_is_not_cut_before_what_is_wrong(tmp_path: Path) -> None:
    """It begins with where in its source, and ends with what it found."""
    folder = tmp_path / ("a long name " * 9)
    folder.mkdir()
    header = "NRRD0004\ntype: float\ndimension: 3\nsizes: 4 {} 4\nencoding: raw\n\n"
    for name, content, said in (
        ("endian.nrrd", header.format(4), "require endian info)"),
        ("sizes.nrrd", header.format(-4), "axis 1 size is zero!)"),
        ("words.mha", "words", 'words.mha")'),
    ):
        (folder / name).write_text(content)
        with pytest.raises(DataError) as raised:
            load(folder / name)
        message = str(raised.value)
        assert message.startswith(f"{folder / name}: cannot be read (") and message.endswith(said)
        assert ".cxx" not in message and "Exception thrown" not in message and message.isprintable()


def test_every_file_has_one_reader() -> None:
    endings = [ending for reader in READERS for ending in reader.endings]
    assert sorted(endings) == sorted((*ENDINGS, *PICTURES)) and len({*endings}) == len(endings)
    for reader in READERS:
        for ending in reader.endings:
            assert reader_of(Path(f"a{ending}")) is reader_of(Path(f"A{ending.upper()}")) is reader
            assert stem(Path(f"a.b{ending}")) == "a.b"
    assert [reader.name for reader in READERS if not reader.endings] == ["DICOM series"]


# --------------------------------------------------------------------- what is decided for the user


def test_a_nifti_without_affine_is_read_with_a_note(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(random_image(), None)
    image.header.set_zooms((2, 3, 4))
    path = tmp_path / "bare.nii.gz"
    nibabel.save(image, path)
    loaded = load(path)
    assert loaded.notes == (f"{path}: has no affine (sform_code and qform_code are 0): left and right are not known",)
    np.testing.assert_allclose(abs(loaded.image.affine[:3, :3]), np.diag([2, 3, 4]))
    Volume.read(Case("x", (path,), None)).save_labels(random_label(), tmp_path / "out.nii.gz")
    saved = nibabel.load(tmp_path / "out.nii.gz")
    assert (saved.header["sform_code"], saved.header["qform_code"]) == (0, 0)
    assert saved.header.get_zooms() == (2, 3, 4)
    case = Case("x", (path,), tmp_path / "out.nii.gz")
    read_all([case], 3)
    assert len(Volume.read(case).notes) == 2


@pytest.mark.parametrize("shape", [SHAPE[:2], (9, 7, 1), (9, 7, 1, 1), (*SHAPE, 1), (1, 7, 11)])
def test_axes_of_length_one(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = write(tmp_path / "x.nii.gz", random_image(shape))
    space = (*shape, 1)[:3]
    labels = random_label(space)
    Volume.read(Case("x", (path,), None)).save_labels(labels, tmp_path / "label.nii.gz")
    case = Case("x", (path,), tmp_path / "label.nii.gz")
    read_all([case], 3, 1)
    loaded = Volume.read(case)
    np.testing.assert_array_equal(loaded.image, random_image(shape).reshape(1, *space))
    np.testing.assert_array_equal(loaded.label[0], labels)
    np.testing.assert_allclose(loaded.image.affine, AFFINE, atol=1e-5)
    assert nibabel.load(tmp_path / "label.nii.gz").shape == space


def test_channels_of_one_file_and_of_several(tmp_path: Path) -> None:
    """A fourth axis and further files add up; a file on the same grid is taken as it is."""
    both = random_image((*SHAPE, 2))
    nudged = AFFINE.copy()
    nudged[0, 3] += 0.05  # rounding of headers: within a tenth of a voxel
    files = (write(tmp_path / "both.nii.gz", both), write(tmp_path / "third.nii.gz", random_image(seed=1), nudged))
    image = Volume.read(Case("x", files, None)).image
    assert image.shape == (3, *SHAPE)
    np.testing.assert_array_equal(image[:2], np.moveaxis(both, -1, 0))
    np.testing.assert_array_equal(image[2], random_image(seed=1))
    np.testing.assert_allclose(image.affine, AFFINE, atol=1e-5)
    Volume.read(Case("x", files, None)).save_labels(random_label(), tmp_path / "out.nii.gz")
    saved = nibabel.load(tmp_path / "out.nii.gz")
    assert saved.shape == SHAPE
    np.testing.assert_allclose(saved.affine, AFFINE, atol=1e-5)


def test_a_few_broken_voxels_take_the_least_value(tmp_path: Path) -> None:
    voxels = random_image((*SHAPE, 2))
    voxels[..., 1] += 5000  # each channel has its own least value
    broken = voxels.copy()
    broken[1, 2, 3, 0], broken[4:6, 0, 0, 1], broken[0, 0, 0, 1] = np.nan, -np.inf, np.inf
    path = write(tmp_path / "x.nii.gz", broken)
    finite = np.isfinite(broken)
    loaded = load(path)
    image = np.moveaxis(loaded.image.numpy(), 0, -1)
    np.testing.assert_array_equal(image[finite], voxels[finite])
    for c, count in enumerate((1, 3)):
        least = voxels[..., c][finite[..., c]].min()
        np.testing.assert_array_equal(image[..., c][~finite[..., c]], [least] * count)
        assert loaded.notes[c].startswith(f"{path}: {count} voxels are NaN or infinite, taken")
    # Beyond float32 is infinite for us; exactly half may be broken, one more may not.
    wide = np.linspace(0, 1, 10).reshape(5, 2, 1)
    wide[:2], wide[2, 0], least = 1e300, np.nan, np.float32(5 / 9)
    np.testing.assert_array_equal(load(write(tmp_path / "w.nii", wide)).image[0, :3, 0], least)
    wide[2, 1] = np.nan
    path = write(tmp_path / "w.nii", wide)
    refuses(lambda: load(path), path, "6 voxels that are NaN or infinite, over half")


def test_voxel_edges_have_bounds(tmp_path: Path) -> None:
    for edge, fits in ((0.0011, True), (99.0, True), (0.0009, False), (101.0, False)):
        path = write(tmp_path / "x.nii", random_image(), np.diag([1, edge, 1, 1]))
        if fits:
            load(path)
        else:
            refuses(lambda path=path: load(path), path, r"voxel edges of .* expected 0\.001 to 100")


# ------------------------------------------------------------------------------------------- memory


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
def test_reading_takes_no_more_than_the_voxels(tmp_path: Path, scaled: bool) -> None:
    """64 MiB of float32. Beyond it there is one slab, SLAB voxels: as int16, and where it is scaled as float64 times
    the slope, plus the intercept, and the slab before; under 7 MiB in all."""
    shape = (256, 256, 256)
    voxels = int(np.prod(shape))
    image = nibabel.Nifti1Image(np.ones(shape, np.int16), np.eye(4))
    if scaled:
        image.header.set_slope_inter(2.0, -1024.0)
    nibabel.save(image, tmp_path / "x.nii")
    label = write(tmp_path / "label.nii", np.zeros(shape, np.uint8), np.eye(4))
    slab = SLAB * (2 + 3 * 8) + 2**16
    assert slab < 7 * 2**20

    def peak(label: Path | None) -> int:
        tracemalloc.start()
        try:
            loaded = Volume.read(Case("x", (tmp_path / "x.nii",), label))
            assert loaded.image[0, 3, 5, 7] == (2 - 1024 if scaled else 1)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    Volume.read(Case("x", (write(tmp_path / "small.nii", random_image()),), None))  # lazy imports
    assert 4 * voxels <= peak(None) <= 4 * voxels + slab
    assert 6 * voxels <= peak(label) <= (4 + 2) * voxels + slab


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
@pytest.mark.parametrize(
    "shape, words",
    [
        ((30_000, 30_000, 30_000), "claims 30000 x 30000 x 30000 x 1 voxels, .* than a file of"),
        ((9, 7, 12_000), "claims 9 x 7 x 12000 x 1 voxels, 0.00302 GB, more than a file of"),
        ((9, -7, 11), r"has a negative axis: shape \(9, -7, 11\)"),
    ],
)
def test_headers_that_claim_too_much(tmp_path: Path, ending: str, shape: tuple[int, ...], words: str) -> None:
    path = write(tmp_path / f"a{ending}", random_image())
    data = bytearray(nibabel.load(path).to_bytes())
    np.frombuffer(data, nibabel.Nifti1Header.template_dtype, 1)[0]["dim"][1:4] = shape
    path.write_bytes(gzip.compress(data) if ending == ".nii.gz" else data)
    refuses(lambda: load(path), path, words)


def test_a_volume_that_gzip_makes_tiny_is_read(tmp_path: Path) -> None:
    """Of zeros, as far as it goes: 1000 times smaller."""
    path = write(tmp_path / "a.nii.gz", np.zeros((128, 128, 128), np.float32))
    data = nibabel.load(path).to_bytes()
    path.write_bytes(gzip.compress(data))
    assert len(data) > 950 * path.stat().st_size
    assert load(path).image.shape == (1, 128, 128, 128)


@pytest.mark.parametrize("ending", [".nii", ".nrrd", ".mha", ""])
def test_what_the_memory_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """Files that hold what they claim, on a machine that is too small."""
    path = tmp_path / f"a{ending}"
    if not ending:
        write_series(path, HU)
    elif ending == ".nii":
        write(path, random_image().astype(np.uint8))
    else:
        write_itk(path, random_image().astype(np.uint8))
    monkeypatch.setattr(grid, "MEMORY", 4 * 693)  # 9 x 7 x 11 voxels
    assert load(path).image.shape == (1, *SHAPE)
    monkeypatch.setattr(grid, "MEMORY", 4 * 693 - 1)
    refuses(lambda: load(path), path, "its header claims .* more than this machine's memory can")
