"""A case is read once, from its files to its page: in a test and in a prediction."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import nibabel
import pydicom
import pytest
import SimpleITK as sitk

from tests.data.volume.files import HU, random_image, write, write_series

COUNTED: list[Counter[Path]] = []  # of the tests that count now


def _hook(event: str, arguments: tuple) -> None:
    if COUNTED and event == "open" and isinstance(arguments[0], str | bytes | Path):
        COUNTED[-1][Path(str(arguments[0]))] += 1


sys.addaudithook(_hook)  # it stays until the process ends


@pytest.fixture
def opened(monkeypatch) -> Iterator[Counter[Path]]:
    """How often each path was opened by Python, or read by SimpleITK."""

    class Reader(sitk.ImageFileReader):
        def Execute(self):
            counts[Path(self.GetFileName())] += 1
            return super().Execute()

    counts: Counter[Path] = Counter()
    monkeypatch.setattr(sitk, "ImageFileReader", Reader)
    COUNTED.append(counts)
    yield counts
    COUNTED.remove(counts)


@pytest.mark.slow
def test_in_a_prediction(predict, network, tmp_path, monkeypatch, opened):
    folder = tmp_path / "in"
    files = [write(folder / name, random_image()) for name in ("a.nii.gz", "b.nii")]
    for name in ("c.nrrd", "d.mha"):
        sitk.WriteImage(sitk.GetImageFromArray(random_image()), str(folder / name))
        files.append(folder / name)
    slices = sorted(write_series(folder / "series", HU).iterdir())
    pixels: Counter[Path] = Counter()
    read = pydicom.dcmread

    def counted(file, *args, stop_before_pixels=False, **kwargs):
        pixels[Path(file)] += not stop_before_pixels
        return read(file, *args, stop_before_pixels=stop_before_pixels, **kwargs)

    monkeypatch.setattr(pydicom, "dcmread", counted)
    network(lambda x: x)
    opened.clear()
    predict(folder, "--model.dicom_seg=true").well()
    out = tmp_path / "out" / "predictions"
    assert len(list(out.glob("*.png"))) == 5 and (out / "series.dcm").exists()
    expected = dict.fromkeys(files, 1)
    expected[folder / "c.nrrd"] = 2  # ITK does not tell the unit of the space: the header is read
    assert {file: opened[file] for file in files} == expected
    assert pixels == dict.fromkeys(slices, 1)  # what a slice is was asked of its header before


@pytest.mark.slow
def test_in_a_test(segment, checkpoints, decathlon, tmp_path, opened):
    files = [decathlon / kind / "3.nii.gz" for kind in ("images", "labels")]
    places = {"out": tmp_path / "out", "root": decathlon, "ckpt": checkpoints[0], "net": {"out_channels": 2}}
    segment("test", **places).well()
    assert (tmp_path / "out" / "test" / "3.png").exists()
    assert {file: opened[file] for file in files} == dict.fromkeys(files, 1)
    nibabel.load(files[0])  # and the count can be wrong
    assert opened[files[0]] > 1
