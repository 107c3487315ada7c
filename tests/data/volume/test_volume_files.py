"""Files of volumes of every format: the good ones as ITK reads them, and their labels beside them; one line for each
bad one."""

import gzip
from itertools import product

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk
import torch
from monai.data import MetaTensor
from nibabel.spm2analyze import Spm2AnalyzeImage

from ndlightnet.data.volume.datasets import find_inputs
from ndlightnet.data.volume.file_grid import NO_SIDES, Case
from ndlightnet.data.volume.formats import ENDINGS, PICTURES, READERS, reader_of, stem
from ndlightnet.data.volume.volume import Volume

from . import files
from .files import (
    AFFINE,
    HU,
    SHAPE,
    load,
    patched,
    random_image,
    random_label,
    read_all,
    refuses,
    write,
    write_itk,
    write_nrrd,
    write_series,
)

VOXELS = HU.astype(np.int16)
THIN = np.diag([0.4, 0.4, 6.0, 1])
PAIR, NIFTI_2 = nibabel.Nifti1Pair, nibabel.Nifti2Image
UNITS = {"um": (1e-3, "micron"), "m": (1e3, "meter")}  # in mm, and nibabel's name


def nifti(voxels=VOXELS, affine=AFFINE, unit="mm", kind=nibabel.Nifti1Image, change=lambda image: None):
    def write_nifti(path):
        image = kind(voxels, affine)
        if kind is not Spm2AnalyzeImage:
            image.header.set_xyzt_units(unit)
        change(image)
        nibabel.save(image, path)

    return write_nifti


def swapped(voxels, affine):
    return nibabel.Nifti1Image(voxels.astype(">i2"), affine, nibabel.Nifti1Header(endianness=">"))


def only_qform(image):
    image.set_qform(AFFINE, 1)
    image.set_sform(None, 0)


def itk(affine=AFFINE, fields="", packed=False):
    return lambda path: write_itk(path, VOXELS, affine, fields, packed)


def nrrd(affine, fields):
    return lambda path: write_nrrd(path, VOXELS, affine, fields)


def nan(fraction):
    return np.where(np.random.default_rng(0).random(SHAPE) < fraction, np.nan, random_image())


# By name: how it is written, and its unit in mm (of each axis) where the reference takes it for mm.
GOOD = {
    "plain.nii": (nifti(), 1),
    "packed.nii.gz": (nifti(), 1),
    "UPPER.NII.GZ": (nifti(), 1),
    "second.nii": (nifti(kind=NIFTI_2), 1),
    "swapped.nii": (nifti(kind=swapped), 1),
    "unknown.nii": (nifti(unit="unknown"), 1),
    "sform.nii": (nifti(change=lambda image: image.set_qform(None, 0)), 1),
    "qform.nii": (nifti(change=only_qform), 1),
    "permuted.nii": (nifti(affine=AFFINE @ np.eye(4)[[2, 0, 1, 3]]), 1),
    "thin.nii": (nifti(affine=THIN), 1),
    "finest.nii": (nifti(affine=np.diag([1, 0.0011, 1, 1])), 1),
    "coarsest.nii": (nifti(affine=np.diag([1, 99.0, 1, 1])), 1),
    "below_a_micron.nii": (nifti(affine=np.diag([0.2, 0.2, 1, 1]), unit="micron"), 1),
    "slope.nii": (nifti(change=lambda image: image.header.set_slope_inter(0.25, -10)), 1),
    "bytes.nii": (nifti(np.arange(np.prod(SHAPE)).reshape(SHAPE).astype(np.uint8)), 1),
    "double.nii": (nifti(VOXELS.astype(np.float64)), 1),
    "plane.nii": (nifti(VOXELS[:, :, 0], np.diag([0.4, 0.5, 1, 1])), 1),
    "some_nan.nii": (nifti(nan(0.01)), 1),
    "pair.hdr": (nifti(kind=PAIR), 1),
    "pair_packed.hdr.gz": (nifti(kind=PAIR), 1),
    "analyze.hdr": (nifti(kind=Spm2AnalyzeImage, affine=np.diag([-2.0, 2, 5, 1])), 1),
    "plain.nrrd": (itk(), 1),
    "UPPER.NRRD": (lambda path: itk()(path.with_suffix(".nrrd")).rename(path), 1),
    "packed.nrrd": (itk(packed=True), 1),
    "units.nrrd": (nrrd(None, 'units: "cm" "\u00b5m" "nm"\nspacings: 0.1 400 2e5\n'), (10, 1e-3, 1e-6)),
    "space_units.nrrd": (nrrd(np.diag([0.1, 400, 2e5, 1]), 'space units: "cm" "\u03bcm" "nm"\n'), (10, 1e-3, 1e-6)),
    "plain.mha": (itk(), 1),
    "packed.mha": (itk(packed=True), 1),
    "um.mha": (itk(THIN * 1000, "DistanceUnits = um\n"), 1e-3),
    "two.mhd": (itk(), 1),
    "series": (lambda path: write_series(path, HU), 1),
}
for name, (mm, code) in UNITS.items():
    affine = np.diag([1 / mm] * 3 + [1]) @ AFFINE
    GOOD |= {f"{name}{end}": (nifti(affine=affine, unit=code), 1) for end in (".nii", ".nii.gz")}
    GOOD[f"{name}.hdr"] = nifti(affine=affine, unit=code, kind=PAIR), 1
    GOOD[f"{name}.nrrd"] = nrrd(affine, f'space units: "{name}" "{name}" "{name}"\n'), mm


def reference(path):
    """Voxels (x, y[, z]) and the affine to RAS, by ITK; by nibabel what ITK does not read (NIfTI-2), turns (Analyze),
    or fills with 0 (NaN)."""
    if path.name.startswith(("second", "analyze", "some_nan")):
        image = nibabel.load(path)
        return image.get_fdata(), image.affine
    image = sitk.ReadImage(sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(path)) if path.is_dir() else str(path))
    dims = image.GetDimension()
    affine = np.eye(4)
    for column, index in enumerate([*np.eye(dims, dtype=int).tolist(), [0] * dims]):
        affine[:dims, column if column < dims else 3] = image.TransformIndexToPhysicalPoint(index)
    affine[:dims, :dims] -= affine[:dims, 3:]
    return sitk.GetArrayFromImage(image).T, np.diag([-1, -1, 1, 1]) @ affine


@pytest.mark.parametrize("name", GOOD)
def test_a_file_is_read_as_itk_reads_it_and_so_are_its_labels(tmp_path, name):
    make, mm = GOOD[name]
    make(path := tmp_path / name)
    volume = load(path)
    assert bool(volume.notes) == (name in ("some_nan.nii", "units.nrrd"))
    voxels, affine = reference(path)
    affine[:3] *= np.reshape(mm, (-1, 1))
    voxels = np.where(np.isnan(voxels), np.nanmin(voxels), voxels)
    np.testing.assert_allclose(volume.image[0].numpy().reshape(voxels.shape), voxels, rtol=1e-6)
    np.testing.assert_allclose(volume.image.affine, affine, rtol=1e-5, atol=1e-5)
    labels, out = random_label(volume.image.shape[1:]), tmp_path / f"{stem(path)}_labels.nii.gz"
    volume.save_labels(labels, out)
    voxels, affine = reference(out)
    np.testing.assert_array_equal(voxels.reshape(labels.shape), labels)
    np.testing.assert_allclose(affine, volume.image.affine, rtol=1e-5, atol=1e-4)
    unit = nibabel.load(out).header.get_xyzt_units()[0]
    if path.suffix in (".nii", ".gz"):
        assert unit == nibabel.load(path).header.get_xyzt_units()[0]
    if path.suffix in (".nrrd", ".mha"):
        assert unit == ("micron" if np.min(mm) < 1 else "mm")
    np.testing.assert_array_equal(Volume.read(Case("x", (path,), out), 3).label[0], labels)


def cut(make, ending=""):
    """Two thirds of a file, or of the file of voxels beside it."""

    def write_cut(path):
        make(path)
        file = path.with_name(path.stem + ending) if ending else path
        file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])

    return write_cut


def alone(make, ending):
    def write_alone(path):
        make(path)
        path.with_name(path.stem + ending).unlink()

    return write_alone


def content(data):
    return lambda path: path.write_bytes(data)


def claiming(*shape):
    def write_claiming(path):
        path.write_bytes(patched(write(path, random_image()).read_bytes(), 42, np.array(shape, "<i2").tobytes()))

    return write_claiming


def faulty(fault):
    return lambda path: files.broken_image(write(path, random_image()), fault)


NRRD = "NRRD0004\ntype: float\ndimension: 3\nsizes: 4 {} 4\nencoding: raw\n\n"
# By name: how it is written, and what its line says.
BAD = {
    "cut.nii": (cut(nifti()), "more than a file of"),
    "cut.nrrd": (cut(itk()), "cannot be read"),
    "cut.mha": (cut(itk()), "cannot be read"),
    "cut.hdr": (cut(nifti(kind=PAIR), ".img"), "more than a file of"),
    "cut.mhd": (cut(itk(), ".raw"), "cannot be read"),
    "alone.hdr": (alone(nifti(kind=PAIR), ".img"), "has no voxels beside it, expected alone.img"),
    "alone.mhd": (alone(itk(), ".raw"), "cannot be read"),
    "gone.nii": (lambda path: None, "No such file"),
    "empty.nrrd": (content(b""), "cannot be read"),
    "text.nii": (content(b"patient,age\n1,2\n"), "not a NIfTI or Analyze file"),
    # what ITK says is not cut before what is wrong, with which it ends
    "endian.nrrd": (content(NRRD.format(4).encode()), r"require endian info\)$"),
    "sizes.nrrd": (content(NRRD.format(-4).encode()), r"axis 1 size is zero!\)$"),
    "words.mha": (content(b"words"), r'words.mha"\)$'),
    "channels.nii": (nifti(np.zeros((*SHAPE, 2), np.int16)), "has 2 channels, expected 1"),
    "fine.nii": (nifti(affine=np.diag([1, 0.0009, 1, 1])), r"voxel edges of 0.0009 to 1 mm, expected 0\.001 to 100"),
    "coarse.nii": (nifti(affine=np.diag([1, 101.0, 1, 1])), r"voxel edges of .* expected 0\.001 to 100"),
    "no_unit.nii": (nifti(affine=np.diag([2e-4, 2e-4, 1e-3, 1]), unit="unknown"), r"expected 0\.001 to 100"),
    **{f"{fault}.nii.gz": (faulty(fault), words) for fault, (_, words) in files.FAULTS.items()},
}
for end in (".nii", ".nii.gz"):
    BAD[f"huge{end}"] = claiming(*[30_000] * 3), "claims 30000 x 30000 x 30000 x 1 voxels, .* than a file of"
    BAD[f"long{end}"] = claiming(9, 7, 12_000), "claims 9 x 7 x 12000 x 1 voxels, 0.00302 GB, more than a file of"
    BAD[f"negative{end}"] = claiming(9, -7, 11), r"has a negative axis: shape \(9, -7, 11\)"


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_a_line(tmp_path, name):
    (folder := tmp_path / ("a long name " * 9)).mkdir()
    make, words = BAD[name]
    make(path := folder / name)
    refuses(lambda: Volume.read(Case("x", (path,), None), channels=1), path, words, (".cxx", "Exception thrown"))


def test_every_file_is_listed_good_or_bad(tmp_path):
    for name, (make, _) in (*GOOD.items(), *BAD.items()):
        make(tmp_path / name)
    (tmp_path / "envi.hdr").write_text("ENVI\n")
    cases = find_inputs(tmp_path, 1, notes := [])
    assert sorted(case.images[0].name for case in cases) == sorted({*GOOD, *BAD} - {"gone.nii"})
    assert len(notes) == 1 and "1 entry is left out: envi.hdr" in notes[0]


def test_every_file_has_one_reader():
    endings = [ending for reader in READERS for ending in reader.endings]
    assert sorted(endings) == sorted((*ENDINGS, *PICTURES)) and len({*endings}) == len(endings)
    for reader in READERS:
        for ending in reader.endings:
            names = [files.Path(f"a.b{ending}"), files.Path(f"a.b{ending.upper()}")]
            assert [reader_of(name) for name in names] == [reader, reader] and {*map(stem, names)} == {"a.b"}
    assert [reader.name for reader in READERS if not reader.endings] == ["DICOM series"]


# --------------------------------------------------------------------------- what is decided for the user


def test_notes_on_what_a_header_lacks(tmp_path):
    """No affine, a plane, no names of the axes, an unknown unit, two spacings."""

    def noted(path, note):
        volume = load(path)
        assert volume.notes == (f"{path}: {note}",)
        return volume.image

    image = nibabel.Nifti1Image(random_image(), None)
    image.header.set_zooms((2, 3, 4))
    nibabel.save(image, path := tmp_path / "bare.nii.gz")
    affine = noted(path, f"has no affine (sform_code and qform_code are 0): {NO_SIDES}").affine
    np.testing.assert_allclose(abs(affine[:3, :3]), np.diag([2, 3, 4]))
    load(path).save_labels(random_label(), out := tmp_path / "out.nii.gz")
    header = nibabel.load(out).header
    assert (header["sform_code"], header["qform_code"], header.get_zooms()) == (0, 0, (2, 3, 4))
    assert len(Volume.read(Case("x", (path,), out), 3).notes) == 2

    plane = sitk.GetImageFromArray(VOXELS[:, :, 0].T)
    plane.SetSpacing((2.0, 3.0))
    sitk.WriteImage(plane, str(path := tmp_path / "plane.mha"))
    image = noted(path, "is a plane, taken as one slice of 1 mm")
    np.testing.assert_array_equal(image[0], VOXELS[:, :, :1])
    np.testing.assert_allclose(image.affine, np.diag([-2.0, -3.0, 1, 1]))

    image = noted(
        write_nrrd(tmp_path / "bare.nrrd", VOXELS, None, "spacings: 1 2 3"), f"has no field 'space': {NO_SIDES}"
    )
    np.testing.assert_array_equal(image[0], VOXELS)

    odd = write_nrrd(tmp_path / "odd.nrrd", random_image(), AFFINE, 'space units: "p" "p" "p"\n')
    noted(odd, "its unit of length is p, taken as mm")
    image = nibabel.Nifti1Image(random_image(), AFFINE)
    image.header["xyzt_units"] = 5
    nibabel.save(image, path := tmp_path / "odd.nii")
    noted(path, "its unit of length is 5, taken as mm")

    image = nibabel.load(write(path := tmp_path / "sform.nii", random_image(), np.eye(4)))
    image.header["pixdim"][1:4] = 2, 2, 3
    nibabel.save(nibabel.Nifti1Image(image.get_fdata(), None, image.header), path)
    note = "its sform has voxels of 1 x 1 x 1, which are taken, pixdim 2 x 2 x 3"
    np.testing.assert_allclose(noted(path, note).pixdim, 1)


def test_analyze(tmp_path):
    """Its affine is in a file .mat, if there is one; else left and right are not known."""
    image = Spm2AnalyzeImage(VOXELS, AFFINE)
    image.header["vox_units"] = b"mm"
    nibabel.save(image, path := tmp_path / "a.hdr")
    np.testing.assert_allclose(load(path).image.affine, AFFINE, atol=1e-5)
    assert load(path).notes == () and torch.equal(load(tmp_path / "a.img").image, load(path).image)
    (tmp_path / "a.mat").unlink()
    assert load(path).notes == (f"{path}: an Analyze header has no affine: {NO_SIDES}",)
    edges = np.linalg.norm(AFFINE[:3, :3], axis=0)
    np.testing.assert_allclose(load(path).image.pixdim, edges)
    path.write_bytes(patched(path.read_bytes(), 56, b"um\0\0"))  # vox_units
    np.testing.assert_allclose(load(path).image.pixdim, edges / 1000)


@pytest.mark.parametrize("shape", [SHAPE[:2], (9, 7, 1), (9, 7, 1, 1), (*SHAPE, 1), (1, 7, 11)])
def test_axes_of_length_one(tmp_path, shape):
    path = write(tmp_path / "x.nii.gz", random_image(shape))
    labels = random_label(space := (*shape, 1)[:3])
    load(path).save_labels(labels, out := tmp_path / "label.nii.gz")
    volume = Volume.read(Case("x", (path,), out), 3, 1)
    np.testing.assert_array_equal(volume.image, random_image(shape).reshape(1, *space))
    np.testing.assert_array_equal(volume.label[0], labels)
    np.testing.assert_allclose(volume.image.affine, AFFINE, atol=1e-5)
    assert nibabel.load(out).shape == space


def test_channels_of_one_file_and_of_several(tmp_path):
    """A fourth axis and further files add up; a file on the same grid, up to rounding of headers, is taken as it is."""
    both, nudged = random_image((*SHAPE, 2)), AFFINE.copy()
    nudged[0, 3] += 0.05  # within a tenth of a voxel
    paths = write(tmp_path / "both.nii.gz", both), write(tmp_path / "third.nii.gz", random_image(seed=1), nudged)
    volume = Volume.read(Case("x", paths, None))
    np.testing.assert_array_equal(volume.image, np.concatenate([np.moveaxis(both, -1, 0), random_image(seed=1)[None]]))
    np.testing.assert_allclose(volume.image.affine, AFFINE, atol=1e-5)
    volume.save_labels(random_label(), tmp_path / "out.nii.gz")
    assert nibabel.load(tmp_path / "out.nii.gz").shape == SHAPE
    series = sitk.JoinSeries([sitk.GetImageFromArray(both[..., c].T) for c in range(2)])
    sitk.WriteImage(series, str(tmp_path / "series.mha"))
    for path in (write_itk(tmp_path / "vector.nrrd", both), tmp_path / "series.mha"):
        np.testing.assert_array_equal(load(path).image, np.moveaxis(both, -1, 0))


def test_a_few_broken_voxels_take_the_least_value(tmp_path):
    voxels = random_image((*SHAPE, 2))
    voxels[..., 1] += 5000  # each channel has its own least value
    broken = voxels.copy()
    broken[1, 2, 3, 0], broken[4:6, 0, 0, 1], broken[0, 0, 0, 1] = np.nan, -np.inf, np.inf
    path = write(tmp_path / "x.nii.gz", broken)
    finite, volume = np.isfinite(broken), load(path)
    image = np.moveaxis(volume.image.numpy(), 0, -1)
    np.testing.assert_array_equal(image[finite], voxels[finite])
    for c, count in enumerate((1, 3)):
        least = voxels[..., c][finite[..., c]].min()
        np.testing.assert_array_equal(image[..., c][~finite[..., c]], [least] * count)
        assert volume.notes[c].startswith(f"{path}: {count} voxels are NaN or infinite, taken as {least:.6g}")
    # Beyond float32 is infinite for us; exactly half may be broken, one more may not.
    wide = np.linspace(0, 1, 10).reshape(5, 2, 1)
    wide[:2], wide[2, 0], least = 1e300, np.nan, np.float32(5 / 9)
    np.testing.assert_array_equal(load(write(tmp_path / "w.nii", wide)).image[0, :3, 0], least)
    wide[2, 1] = np.nan
    path = write(tmp_path / "w.nii", wide)
    refuses(lambda: load(path), path, "6 voxels that are NaN or infinite, over half")


def test_a_second_grid_is_resampled_onto_the_first(tmp_path):
    """A smooth function of the place in mm, sampled on two grids, is the same on the first."""

    def sample(affine, shape):
        x, y, z = np.einsum("ij,jxyz->ixyz", affine[:3, :3], np.indices(shape)) + affine[:3, 3, None, None, None]
        return (7 + np.sin(x / 9) + np.cos(y / 8) + 0.05 * z).astype(np.float32)

    fine, coarse = np.diag([-1.5, -1.5, 2.0, 1.0]), np.diag([2.5, 2.0, 3.0, 1.0])
    fine[:3, 3], coarse[:3, 3] = (20, 15, -30), (-20, -20, -45)
    second = sample(coarse, (24, 27, 22))
    paths = write(tmp_path / "ct.nii.gz", sample(fine, (21, 19, 15)), fine), tmp_path / "pet.nii.gz"

    def read(*written):
        write(paths[1], *written)
        return Volume.read(Case("x", paths, None)).image

    image = read(second, coarse)
    assert image.shape == (2, 21, 19, 15)
    np.testing.assert_allclose(image.affine, fine)
    # Linear interpolation is off by at most h^2/8 |f''| an axis: 2.5^2/8/81 + 2^2/8/64 = 0.017.
    assert float((image[0] - image[1]).abs().max()) < 0.02
    short = read(second[:, :, :8], coarse)  # ends at z = -24; beyond it takes its minimum
    np.testing.assert_allclose(short[1, ..., :4], image[1, ..., :4], atol=1e-5)
    np.testing.assert_allclose(short[1, ..., 5:], float(second[:, :, :8].min()), rtol=1e-5)
    coarse[0, 3] += 500
    refuses(lambda: read(second, coarse), paths[1], "does not overlap")


# ------------------------------------------------------------------------------------------------ labels


def test_a_case_is_read(case):
    volume = Volume.read(case)
    assert volume.case.name == "a" and Volume.read(Case("a", case.images, None)).label is None
    for tensor, dtype, truth in (
        (volume.image, torch.float32, random_image()),
        (volume.label, torch.int16, random_label()),
    ):
        assert isinstance(tensor, MetaTensor) and tensor.dtype == dtype and tensor.affine.dtype == torch.float64
        np.testing.assert_array_equal(tensor.numpy(), truth[None])
        np.testing.assert_allclose(tensor.affine, AFFINE, atol=1e-5)


def moved(mm):
    affine = AFFINE.copy()
    affine[1, 3] += mm
    return affine


@pytest.mark.parametrize(
    "words, voxels, affine",
    [
        (r"0\.\.3, expected 0\.\.2", random_label(classes=4), AFFINE),
        (r"-1\.\.1, expected 0\.\.2", random_label().astype(np.int16) - 1, AFFINE),
        ("not whole numbers below 32768", random_label() + np.float32(0.5), AFFINE),
        ("not whole numbers below 32768", np.full(SHAPE, 1.01, np.float32), AFFINE),
        ("not whole numbers below 32768", random_label().astype(np.float32) * 40000, AFFINE),
        ("labels that are NaN or infinite", np.full(SHAPE, np.nan, np.float32), AFFINE),
        ("a label should have 3 axes", random_label((*SHAPE, 2)), AFFINE),
        (r"shape \(9, 7, 10\), its image a.nii.gz has \(9, 7, 11\)", random_label((9, 7, 10)), AFFINE),
        ("another affine than its image a.nii.gz", random_label(), AFFINE @ np.diag([-1, 1, 1, 1])),
        ("another affine than its image a.nii.gz", random_label(), AFFINE @ np.diag([1, 1, 1.05, 1])),
        (r"another affine .* corners are 0\.5 mm apart", random_label(), moved(0.5)),
    ],
)
def test_a_broken_label_is_refused(case, words, voxels, affine):
    write(case.label, voxels, affine)
    refuses(lambda: read_all([case], 3), case.label, words)


def test_a_label_may_be_moved_by_rounding_and_not_cut(case):
    write(case.label, random_label(), moved(0.05))
    read_all([case], 3)
    case.label.write_bytes(case.label.read_bytes()[:60])
    refuses(lambda: read_all([case], 3), case.label, "cannot be read")


@pytest.mark.parametrize("order, signs", [((0, 1, 2), (-1, -1, 1)), ((2, 0, 1), (1, -1, -1))])
def test_a_label_in_another_index_order(case, order, signs):
    """The same voxels at the same places in the patient; half a voxel beside is another grid."""
    label = random_label().transpose(order)[tuple(slice(None, None, s) for s in signs)]
    to_image = np.zeros((4, 4))  # from the label's indices to the image's
    to_image[3, 3] = 1
    for axis, (of_image, sign, size) in enumerate(zip(order, signs, label.shape, strict=True)):
        to_image[of_image, axis], to_image[of_image, 3] = sign, (sign < 0) * (size - 1)
    write(case.label, label, AFFINE @ to_image)
    read = Volume.read(case).label
    assert read.as_tensor().is_contiguous()
    np.testing.assert_array_equal(read.numpy(), random_label()[None])
    np.testing.assert_allclose(read.affine, AFFINE, atol=1e-5)
    to_image[0, 3] += 0.5
    write(case.label, label, AFFINE @ to_image)
    refuses(lambda: Volume.read(case), case.label, "another affine|has shape")


@pytest.mark.parametrize("largest, steps, intercept", list(product([1, 104, 32767], [255, 7, 1000], [0, 32000])))
def test_labels_with_a_slope(case, largest, steps, intercept):
    """Whole numbers up to rounding in float32: 255 x 1/255 is 1.00000006."""
    labels = np.random.default_rng(0).integers(0, largest + 1, SHAPE)
    image = nibabel.Nifti1Image(((labels - intercept) * steps).astype(np.int32), AFFINE)
    image.header.set_slope_inter(np.float32(1 / steps), intercept)
    nibabel.save(image, case.label)
    np.testing.assert_array_equal(Volume.read(case).label[0], labels)


@pytest.mark.parametrize("codes", [(1, 0), (0, 1), (1, 3), (4, 2)])
@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, NIFTI_2, PAIR])
def test_labels_keep_the_grid_of_a_header_and_nothing_else(tmp_path, kind, codes):
    """Both codes and transforms, units and time; no name, date, slope or range."""
    image = kind(VOXELS, AFFINE)
    image.set_sform(AFFINE, codes[0])
    image.set_qform(AFFINE, codes[1])
    header = image.header
    header.set_xyzt_units("mm", "sec")
    header["descrip"], header["aux_file"], header["intent_name"] = b"J. Doe 1970", b"jdoe", b"Doe"
    header.set_intent("z score", name="Doe")
    header.set_slope_inter(0.5, 3.0)
    header["cal_max"], header["toffset"] = 300, 2.5
    header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"Jane Doe"))
    if kind is not NIFTI_2:
        header["db_name"] = b"Doe 1970"
    nibabel.save(image, path := tmp_path / ("a.hdr" if kind is PAIR else "a.nii"))
    labels, out = torch.from_numpy(random_label(classes=256)).long(), tmp_path / "new" / "folder" / "l.nii.gz"
    load(path).save_labels(labels, out)
    assert [file.name for file in out.parent.iterdir()] == ["l.nii.gz"], "a draft was left behind"
    assert b"doe" not in gzip.decompress(out.read_bytes()).lower()
    saved, source = nibabel.load(out), nibabel.load(path)
    assert saved.get_data_dtype() == np.uint8
    np.testing.assert_array_equal(np.asarray(saved.dataobj), labels.numpy())
    for form in ("get_sform", "get_qform"):
        np.testing.assert_allclose(getattr(saved, form)(), getattr(source, form)(), atol=1e-4)
    saved = saved.header
    np.testing.assert_allclose(saved.get_zooms(), source.header.get_zooms(), rtol=1e-6)
    assert (saved["sform_code"], saved["qform_code"]) == codes
    assert saved.extensions == [] and saved.get_intent() == ("none", (), "")
    assert (saved["descrip"], saved["aux_file"], saved["cal_max"]) == (b"", b"", 0)
    assert saved.get_xyzt_units() == ("mm", "sec") and saved["toffset"] == 2.5
    assert saved["sizeof_hdr"] == header["sizeof_hdr"]
    read_all([Case("in", (path,), out)], 256)


def test_save_labels_refuses(case, tmp_path, monkeypatch):
    volume, out = Volume.read(case), tmp_path / "out.nii.gz"
    volume.save_labels(random_label().astype(np.int64) * 300, out)
    saved = nibabel.load(out)
    assert saved.get_data_dtype() == np.int16 and np.asarray(saved.dataobj).max() == 600
    for labels, words in (
        (random_label((9, 7, 10)), r"labels have shape \(9, 7, 10\), .*a.nii.gz has \(9, 7, 11\)"),
        (random_label((1, *SHAPE)), "shape"),
        (random_image(), "whole numbers, got float32"),
        (random_label().astype(int) - 1, r"0\.\.32767, are -1\.\.1"),
        (random_label().astype(int) * 40000, r"0\.\.32767, are 0\.\.80000"),
    ):
        with pytest.raises(ValueError, match=words):
            volume.save_labels(labels, out)
    with pytest.raises(ValueError, match=r"written as \.nii\.gz, got out\.mha"):
        volume.save_labels(random_label(), tmp_path / "out.mha")
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "out.nii.gz"
    refuses(lambda: volume.save_labels(random_label(), inside), inside, "cannot be written")

    def full(_, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    before = out.read_bytes()
    monkeypatch.setattr(nibabel, "save", full)
    refuses(lambda: volume.save_labels(random_label(), out), out, "No space left")
    assert out.read_bytes() == before and not list(tmp_path.glob(".*")), "not atomic"
