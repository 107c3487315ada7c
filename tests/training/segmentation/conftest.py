"""What the tests of segmentation share: phantoms, two trained checkpoints."""

import shutil
from pathlib import Path

import pytest

from ndlightnet.data.made.phantoms import make_phantoms

CLASSES = "--model.net.init_args.out_channels=2"


@pytest.fixture(scope="session")
def checkpoints(segment, write_decathlon, tmp_path_factory) -> list[Path]:
    """Of two trainings on a folder that is gone since."""
    folder = tmp_path_factory.mktemp("trained")
    root = write_decathlon(folder / "data")
    for seed in (0, 1):
        done = segment(
            "fit",
            CLASSES,
            f"--trainer.default_root_dir={folder}/{seed}",
            f"--data.init_args.root={root}",
            "--data.init_args.patch=[8,8,8]",
            f"--seed_everything={seed}",
        )
        assert (done.status, done.errors) == (0, [])
    shutil.rmtree(root)
    return [folder / str(seed) / "checkpoints" / "last.ckpt" for seed in (0, 1)]


@pytest.fixture(scope="session")
def phantoms(tmp_path_factory) -> Path:
    """Three and a test case. Of seed 3 this runs to the left and back: turning it back shows."""
    folder = tmp_path_factory.mktemp("phantoms") / "data"
    return make_phantoms(folder, 3, 1, seed=3, progress=False)
