"""What the tests of segmentation share: two trained checkpoints."""

import shutil
from pathlib import Path

import pytest

CLASSES = "--model.net.init_args.out_channels=2"


@pytest.fixture(scope="session")
def checkpoints(segment, write_decathlon, tmp_path_factory) -> list[Path]:
    """Of two trainings on a folder that is gone since."""
    folder = tmp_path_factory.mktemp("trained")
    root = write_decathlon(folder / "data")
    for seed in (0, 1):
        done = segment(
            "fit", CLASSES, f"--trainer.default_root_dir={folder}/{seed}",
            f"--data.init_args.root={root}", "--data.init_args.patch=[8,8,8]",
            f"--seed_everything={seed}",
        )  # fmt: skip
        assert (done.status, done.errors) == (0, [])
    shutil.rmtree(root)
    return [folder / str(seed) / "checkpoints" / "last.ckpt" for seed in (0, 1)]
