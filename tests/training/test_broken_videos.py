"""Predict on a folder of 12 videos, 6 of them broken: each bad one costs a line, no more."""

import json

import pytest

from ndlightnet.data.errors import printable
from tests.training.hospital import videos


@pytest.mark.slow
def test_12_videos_of_which_6_are_broken(classify, tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out" / "predictions"
    good, bad = videos(folder)
    (folder / "dangling.mp4").symlink_to("/nowhere")
    (folder / "folder.mp4").mkdir()
    (folder / "picture.png").write_bytes(b"png")
    done = classify(
        "fit",
        f"--trainer.default_root_dir={tmp_path}/run",
        "--data.class_path=MovingDigits",
        f"--data.init_args.root={tmp_path}/digits",
        "--data.init_args.videos=[6,6]",
    )
    assert (done.status, done.errors) == (0, [])
    done = classify(
        "predict",
        f"--trainer.default_root_dir={tmp_path}/out",
        "--data.init_args.root=/gone",
        f"--ckpt_path={tmp_path}/run/checkpoints/last.ckpt",
        f"--data.init_args.input={folder}",
    )
    assert done.status == 1 and "Traceback" not in done.err
    begin = tuple(f"error: {printable(path)}: " for path in bad)
    assert sorted(path for line in done.errors for path in begin if line.startswith(path)) == (sorted(begin))
    assert len(done.errors) == 6
    (note,) = [line for line in done.err.splitlines() if line.startswith("note: ")]
    assert "2 entries are left out: dangling.mp4, picture.png (expected" in note
    found = json.loads((out / "predictions.json").read_text())
    assert sorted(found) == sorted(map(str, good))
    assert len(list(out.glob("*.png"))) == 6 and len(list(out.iterdir())) == 7
