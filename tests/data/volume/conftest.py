"""A case on disk."""

from pathlib import Path

import pytest

from ndlightnet.data.volume.file_grid import Case

from .files import random_image, random_label, write


@pytest.fixture
def case(tmp_path: Path) -> Case:
    image = write(tmp_path / "images" / "a.nii.gz", random_image())
    return Case("a", (image,), write(tmp_path / "labels" / "a.nii.gz", random_label()))
