"""The unit of a PET's voxels, in training and in prediction."""

import json

import numpy as np
import pytest

from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.transforms import Intensity, Prepare
from ndlightnet.training import VolumeData
from ndlightnet.training.segmentation.volume_data import PredictionCases
from tests.data.volume.files import write_series

VOXELS = np.random.default_rng(0).integers(0, 500, (6, 5, 4))


def of_pet(folder, units):
    """A folder to train on, with a series for each unit ("": none); labels are of the same grid."""
    listing = {"modality": {"0": "PET"}, "labels": {"0": "background", "1": "x"}, "training": []}
    for number, unit in enumerate(units):
        tags = {"Units": unit} if unit else {}
        write_series(folder / f"{number}", VOXELS, Modality="PT", **tags)
        write_series(folder / f"{number}_label", VOXELS % 2)
        listing["training"].append({"image": f"{number}", "label": f"{number}_label"})
    (folder / "dataset.json").write_text(json.dumps(listing))
    return folder


@pytest.mark.parametrize(
    ("units", "shared"), [(["BQML", "BQML"], "BQML"), (["", ""], ""), (["BQML", "GML"], ""), (["BQML", ""], "")]
)
def test_a_training_keeps_the_unit_that_its_cases_share(tmp_path, capsys, units, shared):
    data = VolumeData(str(of_pet(tmp_path, units)), [4, 4, 4], workers=0)
    data.setup("fit")
    assert data.value_units == (shared,)
    assert ("in different units" in capsys.readouterr().err) == (len(set(units)) > 1)
    loaded = VolumeData("none", [4, 4, 4])
    if saved := data.state_dict():
        loaded.load_state_dict(saved)
    assert loaded.value_units == ((shared,) if shared else ())


@pytest.mark.parametrize(
    ("trained", "unit", "note"),
    [
        (["BQML"], "BQML", None),
        (["BQML"], "GML", "in GML, the unit of the training is BQML"),
        (["GML"], "BQML", "in BQML, the unit of the training is GML"),
        ([], "GML", None),
        ([], "BQML", "in BQML, the unit of the training is not known (SUV is GML)"),
        ([""], "CNTS", "in CNTS, the unit of the training is not known (SUV is GML)"),
        (["GML"], "", None),
    ],
)
def test_a_prediction_in_another_unit_is_noted(tmp_path, trained, unit, note):
    pet = write_series(tmp_path / "pet", VOXELS, Modality="PT", **({"Units": unit} if unit else {}))
    cases = PredictionCases([Case("pet", (pet,), None)], Prepare([Intensity()]), 2, 1, trained)
    assert cases[0]["volume"].notes == (() if note is None else (f"{pet}: its values are {note}",))


def test_a_note_names_the_file_of_the_channel(tmp_path):
    ct, pet = (write_series(tmp_path / "ct", VOXELS), write_series(tmp_path / "pet", VOXELS, Units="BQML"))
    cases = [Case("x", (ct, pet), None)]
    (note,) = PredictionCases(cases, Prepare([Intensity()] * 2), 2, 2)[0]["volume"].notes
    assert note.startswith(f"{pet}: its values are in BQML")
