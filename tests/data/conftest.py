"""A case and a video on disk."""

from pathlib import Path

import pytest

from ndlightnet.data.volumes import Case

from .video_files import counting, encode
from .volume_files import random_image, random_label, write


@pytest.fixture
def case(tmp_path: Path) -> Case:
    image = write(tmp_path / "images" / "a.nii.gz", random_image())
    return Case("a", (image,), write(tmp_path / "labels" / "a.nii.gz", random_label()))


@pytest.fixture(scope="session")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 frames that tell their numbers, with B-frames and key frames 20 apart."""
    return encode(tmp_path_factory.mktemp("v") / "a.mp4", counting(), bf="3", g="20")
