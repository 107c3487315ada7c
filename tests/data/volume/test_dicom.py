"""A DICOM series is read in the order of its places; every number of a header is looked at, and a wrong one is refused
by file, tag and value."""

import json
import shutil
from dataclasses import replace

import nibabel
import numpy as np
import pydicom
import pytest

from ndlightnet.data.volume.datasets import find_inputs
from ndlightnet.data.volume.volume import Volume

from .files import HU, SHAPE, edit, load, random_label, real, refuses, write_object, write_series

THIRD = 2  # the slice that is spoilt
# LPS to RAS: x and y change sign; PixelSpacing is (between rows, between columns).
DICOM_AFFINE = np.array([[-0.75, 0, 0, 30], [0, -1.25, 0, 20], [0, 0, 2.5, 100], [0, 0, 0, 1.0]])
TILTED = [1, 0, 0, 0, np.cos(0.3), np.sin(0.3)]


@pytest.fixture
def folder(tmp_path):
    return write_series(tmp_path / "s", HU)


def slices_of(folder):
    """In the order of z."""
    return sorted(folder.iterdir(), key=lambda file: pydicom.dcmread(file).ImagePositionPatient[2])


def test_a_series(tmp_path):
    folder = write_series(tmp_path / "series [1]", HU)
    (folder / "notes.txt").write_text("not an image")
    (folder / "[more]").mkdir()
    for number, file in enumerate(sorted(folder.glob("*.dcm"))):  # the place decides, not the number
        edit(file, InstanceNumber=number or None)
    (case,) = find_inputs(folder)
    assert case.name == "series [1]" and case.label is None
    volume = Volume.read(case)
    np.testing.assert_array_equal(volume.image[0], HU)
    np.testing.assert_allclose(volume.image.affine, DICOM_AFFINE)
    volume.save_labels(random_label(), tmp_path / "out.nii.gz")
    saved = nibabel.load(tmp_path / "out.nii.gz")
    np.testing.assert_allclose(saved.header.get_zooms(), (0.75, 1.25, 2.5), atol=1e-6)


@pytest.mark.parametrize("modality", ["CT", "PT"])
def test_a_tilted_gantry_and_a_slope_for_every_slice(tmp_path, modality):
    """Slices from the head down, leaning: the third axis is the way between their places."""
    folder = write_series(tmp_path / "s", HU, gap=-2.5, ImageOrientationPatient=TILTED, Modality=modality)
    slopes, intercepts = np.linspace(0.5, 3, SHAPE[2]), np.arange(SHAPE[2]) - 4.0
    for file in folder.iterdir():
        z = pydicom.dcmread(file).InstanceNumber - 1
        edit(file, RescaleSlope=float(slopes[z]), RescaleIntercept=float(intercepts[z]))
    image = load(folder).image
    np.testing.assert_array_equal(image[0], ((HU + 1024) * slopes + intercepts)[..., ::-1].astype(np.float32))
    affine = DICOM_AFFINE.copy()
    affine[:3, 1] = 0, -1.25 * np.cos(0.3), 1.25 * np.sin(0.3)
    affine[2, 3] = 100 - 2.5 * (SHAPE[2] - 1)
    np.testing.assert_allclose(image.affine, affine, atol=1e-12)


def test_directions_that_are_rounded_to_three_decimals(tmp_path):
    """They are taken, and made of length 1: voxels are not 0.1 % larger than PixelSpacing says."""
    rng = np.random.default_rng(0)
    for number in range(20):
        turn = np.linalg.qr(rng.normal(size=(3, 3)))[0][:2].round(3)
        folder = write_series(tmp_path / str(number), HU[..., :2], ImageOrientationPatient=[*map(float, turn.ravel())])
        for z, file in enumerate(sorted(folder.iterdir())):
            edit(file, ImagePositionPatient=[*map(float, (2.5 * z * np.cross(*turn)).round(4))])
        edges = np.linalg.norm(load(folder).image.affine.numpy()[:3, :2], axis=0)
        np.testing.assert_allclose(edges, (0.75, 1.25), rtol=1e-12)


def test_files_that_are_no_slices_are_passed_over(folder):
    series = pydicom.dcmread(folder / "00.dcm").SeriesInstanceUID
    for kind in ("SR", "RTSTRUCT", "SEG"):
        write_object(folder / f"{kind}.dcm", kind, SeriesInstanceUID=series)
    (folder / "ct.json").write_text("{}")
    (folder / "DICOMDIR").write_bytes((folder / "00.dcm").read_bytes())
    np.testing.assert_array_equal(load(folder).image[0], HU)
    assert load(folder).notes == ()


def test_the_series_with_the_most_slices_is_taken(tmp_path):
    folder = write_series(tmp_path / "s", HU[..., :3], SeriesNumber=1)
    write_series(folder, HU, SeriesNumber=7, SeriesDescription="thin\nslices")
    np.testing.assert_array_equal(load(folder).image[0], HU)
    (note,) = load(folder).notes
    assert note.startswith(f"{folder}: holds 2 series") and "\n" not in note and "11 (SeriesNumber 7" in note
    # As many: the lower number; without numbers, the lower UID.
    write_series(folder, HU[::-1], SeriesNumber=5)
    np.testing.assert_array_equal(load(folder).image[0], HU[::-1])
    twins = write_series(tmp_path / "twins", HU, SeriesInstanceUID="1.2.30")
    write_series(twins, HU[::-1], SeriesInstanceUID="1.2.4")
    np.testing.assert_array_equal(load(twins).image[0], HU)


def test_copies_of_a_slice_are_left_out(folder):
    files = sorted(folder.iterdir())
    shutil.copy(files[3], folder / "copy.dcm")
    shutil.copy(files[5], folder / "another.dcm")
    edit(folder / "another.dcm", SOPInstanceUID="1.2.3")  # sent twice, under another number
    np.testing.assert_array_equal(load(folder).image[0], HU)
    assert load(folder).notes == (f"{folder}: 2 slices are there twice; the copies are left out",)
    # The same place with other voxels is no copy: a second phase, or a fault.
    edit(folder / "copy.dcm", PixelData=(HU[..., 0].T + 1000).astype(np.uint16).tobytes())
    refuses(lambda: load(folder), folder, "0 to 2.5 mm apart")


@pytest.mark.filterwarnings("ignore:Invalid value for VR")
def test_one_slice(tmp_path):
    """Its thickness is that of the header; 1 mm, with a note, where that does not tell."""
    folder = write_series(tmp_path / "s", HU[..., :1], SliceThickness=4)
    np.testing.assert_array_equal(load(folder).image[0], HU[..., :1])
    assert load(folder).notes == ()
    for thickness, mm in ((4, 4), ("0.00", 1), (None, 1)):
        edit(folder / "00.dcm", SliceThickness=thickness)
        volume = load(folder)
        np.testing.assert_allclose(volume.image.affine, DICOM_AFFINE @ np.diag([1, 1, mm / 2.5, 1]))
        assert mm == 4 or "taken as 1 mm" in volume.notes[0]
    for thickness in (-4, "nan", 1e4):
        edit(folder / "00.dcm", SliceThickness=thickness)
        refuses(lambda: load(folder), folder / "00.dcm", "SliceThickness is .*, expected 0 .not known. or 0.001 to 100")


def test_slices_without_rescale(folder):
    """One that lacks it is refused, be it the first; where all do, MR is as it is, and CT is worth a word."""
    no_rescale = {"RescaleSlope": None, "RescaleIntercept": None}
    for victim in (slices_of(folder)[THIRD], folder / "00.dcm"):
        data = victim.read_bytes()
        edit(victim, **no_rescale)
        words = r"has no RescaleIntercept, which \d\d.dcm of its series has"
        refuses(lambda: load(folder), victim, words)
        victim.write_bytes(data)
    for modality, notes in (
        ("CT", (f"{folder}: has no RescaleIntercept; stored values are taken as they are",)),
        ("MR", ()),
    ):
        for file in folder.iterdir():
            edit(file, Modality=modality, **no_rescale)
        np.testing.assert_array_equal(load(folder).image[0], HU + 1024)
        assert load(folder).notes == notes


PLACE, TURN, GAPS = "expected 3 finite numbers", "right angles, of length 1", "expected 2 numbers from 0.001 to 100"


@pytest.mark.filterwarnings("ignore:Invalid value for VR")
@pytest.mark.parametrize(
    "tag, value, words",
    [
        ("ImagePositionPatient", None, "has no ImagePositionPatient"),
        ("ImagePositionPatient", ["nan", "-20", "105"], rf"is \[nan, .*{PLACE}"),
        ("ImagePositionPatient", ["-30", "-20", "inf"], PLACE),
        ("ImagePositionPatient", ["-30", "-20", "1e300"], PLACE),
        ("ImagePositionPatient", ["-30", "-20"], PLACE),
        ("ImagePositionPatient", ["-30", "", "105"], PLACE),
        ("ImageOrientationPatient", [2, 0, 0, 0, 1, 0], TURN),
        ("ImageOrientationPatient", [1, 0, 0, 0, 0.9, 0], TURN),
        ("ImageOrientationPatient", [1, 0, 0, 0.6, 0.8, 0], TURN),
        ("ImageOrientationPatient", [0, 0, 0, 0, 1, 0], TURN),
        ("ImageOrientationPatient", ["nan", 0, 0, 0, 1, 0], TURN),
        ("PixelSpacing", None, "has no PixelSpacing"),
        ("PixelSpacing", [-1.25, 0.75], rf"is \[-1.25, 0.75\], {GAPS}"),
        ("PixelSpacing", [1.25, 0], GAPS),
        ("PixelSpacing", ["nan", "0.75"], GAPS),
        ("PixelSpacing", [1.25, 2000], GAPS),
        ("PixelSpacing", [1.25], GAPS),
        ("Rows", 0, "is 0, expected 1 to 65535"),
        ("Columns", 0, "is 0, expected 1 to 65535"),
        ("BitsAllocated", 12, "is 12, expected 8 or 16 or 32"),
        ("NumberOfFrames", 8, "holds several frames"),
        ("SamplesPerPixel", 3, "are colours"),
        ("PhotometricInterpretation", "PALETTE COLOR", "is PALETTE COLOR, expected MONOCHROME1"),
        ("PhotometricInterpretation", None, "has no PhotometricInterpretation"),
        ("RescaleSlope", None, "has no RescaleSlope"),
        ("RescaleIntercept", None, "has no RescaleIntercept"),
        ("RescaleSlope", "", "has no RescaleSlope"),
        ("RescaleSlope", 0, "is 0.0, expected a number other than 0"),
        ("RescaleSlope", "nan", "is nan, expected a number other than 0"),
        ("RescaleIntercept", "inf", "is inf, expected a finite number"),
        ("PixelData", None, "has no PixelData"),
        ("PixelData", b"\0\0", "cannot be read"),
    ],
)
def test_a_wrong_number_is_refused(folder, tag, value, words):
    victim = slices_of(folder)[THIRD]
    edit(victim, **{tag: value})
    refuses(lambda: load(folder), victim, words)
    edit(folder / "00.dcm", **{tag: value})  # ... and in the first that is read
    if tag != "PixelData":
        refuses(lambda: load(folder), folder / "00.dcm", words)


def test_a_slice_of_another_volume_and_a_number_that_is_text(folder):
    victim = slices_of(folder)[THIRD]
    content = victim.read_bytes()
    for tags, words in (
        ({"Rows": 9, "Columns": 7}, "Rows is 9, expected 7 as in 00.dcm, of the same series"),
        ({"PixelSpacing": [1.25, 0.8]}, r"PixelSpacing is \[1.25, 0.8\], expected \[1.25, 0.75\] as in 00.dcm"),
        ({"FrameOfReferenceUID": "1.2.3"}, "FrameOfReferenceUID is 1.2.3, expected .* as in"),
        ({"ImageOrientationPatient": [1, 0, 0, 0, 0, 1]}, r"Patient is \[1.0, 0.0.* 1.0\], expected .* as in 00.dcm"),
    ):
        edit(victim, **tags)
        refuses(lambda: load(folder), victim, words)
        victim.write_bytes(content)
    victim.write_bytes(content.replace(b"-20.0", b"wests"))
    refuses(lambda: load(folder), victim, f"ImagePositionPatient is .*wests.*, {PLACE}")


def test_slices_that_lack(folder):
    edit(slices_of(folder)[3], ImagePositionPatient=[-30, -20, 108])
    refuses(lambda: load(folder), folder, r"slices are 2 to 3 mm apart; one is missing or doubled \(between ")
    slices_of(folder)[3].unlink()
    refuses(lambda: load(folder), folder, "slices are 2.5 to 5 mm apart; one is missing or doubled")
    for file in folder.iterdir():
        file.unlink()
    refuses(lambda: load(folder), folder, "has no DICOM slices")


@pytest.mark.slow
def test_real_dicom_lies_under_its_labels():
    """Given in another index order: the same places in mm; and organs have their densities."""
    (case,) = find_inputs(real("ct_torso", "dicom"))
    labels, names = real("ct_torso", "dicom_labels.nii.gz"), real("ct_torso", "labels.json")
    volume = Volume.read(replace(case, label=labels))
    assert volume.image.shape == (1, 512, 512, 20) and -1024 <= float(volume.image.min()) < -900
    label_image = nibabel.load(labels)
    to_label = np.linalg.inv(label_image.affine) @ volume.image.affine.numpy()
    flip = np.sign(np.diag(to_label)[:3]).astype(int)
    np.testing.assert_allclose(to_label[:3, :3], np.diag(flip), atol=1e-6)
    np.testing.assert_allclose(to_label[:3, 3], (flip < 0) * (np.array(label_image.shape) - 1), atol=1e-3)
    matched = np.asarray(label_image.dataobj)[:: flip[0], :: flip[1], :: flip[2]]
    np.testing.assert_array_equal(volume.label[0].numpy(), matched)
    hu = {
        name: float(np.median(volume.image[0].numpy()[matched == int(n)]))
        for n, name in json.loads(names.read_text()).items()
        if (matched == int(n)).any()
    }
    assert 70 < hu["liver"] < 140 and 70 < hu["spleen"] < 160 and 30 < hu["autochthon_left"] < 80
    assert hu["vertebrae_T12"] > 120 and hu["humerus_left"] > 120 and hu["rib_left_9"] > 150
