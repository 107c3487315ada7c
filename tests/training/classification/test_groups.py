"""Videos of one patient are on one side of a split, whichever way the split is made."""

import csv
from pathlib import Path

import numpy as np
import pytest

from ndlightnet.training import VideoData

from ...data.video.made_videos import encode


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Two classes of eight videos, two of each of four patients, whose videos are not neighbours."""
    folder, pictures = tmp_path_factory.mktemp("videos"), np.zeros((2, 16, 16, 3), np.uint8)
    with (folder / "clips.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "patient"])
        for number in range(16):
            path = f"train/{'ab'[number // 8]}/{number:02}.mp4"
            encode(folder / path, pictures)
            table.writerow([path, f"{number % 4}"])
    for name in "ab":
        encode(folder / f"test/{name}/0.mp4", pictures)
    return folder


@pytest.mark.parametrize("split", [{"fold": 0}, {"fold": 1}, {"validation": 0.5}], ids=str)
def test_no_patient_is_on_both_sides(root, split):
    """Also with folds beside validation=0, which holds nothing back by itself."""
    options = {"frames": 2, "size": 16, "workers": 0, "folds": 2, "validation": 0.0, "groups": "patient"}
    data = VideoData(str(root), **{**options, **split})
    data.setup("fit")
    train, held = ({int(sample.path.stem) % 4 for sample in clips.samples} for clips in (data.train_set, data.val_set))
    assert len(train) == len(held) == 2 and not train & held
