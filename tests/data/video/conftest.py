"""A video on disk."""

from pathlib import Path

import pytest

from .made_videos import counting, encode


@pytest.fixture(scope="session")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 frames that tell their numbers, with B-frames and key frames 20 apart."""
    return encode(tmp_path_factory.mktemp("v") / "a.mp4", counting(), bf="3", g="20")
