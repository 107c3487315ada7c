"""Predict on a folder of videos of which half are broken: each bad one costs a line, no more."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from ndlightnet.data.errors import printable
from ndlightnet.data.media import write_video

LONGEST = 255  # bytes of a name, on the file systems of Linux and macOS
GOOD = (r"b$\frac$.mp4", "n" * (LONGEST - 4) + ".mp4", "UPPER.M4V", "two\nlines.mov", os.fsdecode(b"caf\xe9.mp4"))
BAD = {
    "text.mp4": lambda good: b"this is no video",
    "truncated.mp4": lambda good: good[: len(good) // 2],
    "e" * (LONGEST - 5) + ".webm": lambda good: b"",
    os.fsdecode(b"text \xff.mp4"): lambda good: b"text",
}


def videos(folder: Path) -> None:
    write_video(folder / GOOD[0], np.random.default_rng(0).integers(0, 256, (10, 96, 128, 3), np.uint8), 25)
    good = (folder / GOOD[0]).read_bytes()
    for name in GOOD:
        (folder / name).write_bytes(good)
    for name, content in BAD.items():
        (folder / name).write_bytes(content(good))


@pytest.mark.slow
def test_videos_of_which_some_are_broken(classify, tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out" / "predictions"
    folder.mkdir()
    videos(folder)
    (folder / "dangling.mp4").symlink_to("/nowhere")
    (folder / "folder.mp4").mkdir()
    (folder / "picture.png").write_bytes(b"png")
    places = [f"--trainer.default_root_dir={tmp_path}/run", f"--data.init_args.root={tmp_path}/digits"]
    done = classify("fit", "--data.class_path=MovingDigits", *places, "--data.init_args.videos=[6,6]")
    assert (done.status, done.errors) == (0, [])
    places = [f"--trainer.default_root_dir={tmp_path}/out", f"--ckpt_path={tmp_path}/run/checkpoints/last.ckpt"]
    done = classify("predict", *places, "--data.init_args.root=/gone", f"--data.init_args.input={folder}")
    assert done.status == 1 and "Traceback" not in done.err
    lines = tuple(f"error: {printable(folder / name)}: " for name in BAD)
    assert sorted(line for error in done.errors for line in lines if error.startswith(line)) == sorted(lines)
    assert len(done.errors) == len(BAD)
    (note,) = done.notes
    assert "2 entries are left out: dangling.mp4, picture.png (expected" in note
    predicted = json.loads((out / "predictions.json").read_text())
    assert sorted(predicted) == sorted(str(folder / name) for name in GOOD)
    assert len(list(out.glob("*.png"))) == len(GOOD) and len(list(out.iterdir())) == len(GOOD) + 1
