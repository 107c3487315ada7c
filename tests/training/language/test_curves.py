"""The picture of several language models' bits over length."""

import json

import matplotlib.image
import numpy as np
import pytest

from ndlightnet.data.errors import DataError
from ndlightnet.training.language.curves import curves


def test_curves_of_several_runs(tmp_path, capsys):
    for number, name in enumerate(("a/one", "a/two", "b/two")):
        (tmp_path / name).mkdir(parents=True)
        metrics = {
            "bits_per_byte_at": {"8": 2 + number, "16": 1 + number, "32": None},
            "bits_per_byte_by_position": {"0-8": 2 + number, "8-16": 1},
            "same_bytes_at_training_length": {"0-8": 2 + number, "8-16": 2},
            "train_length": 8,
        }
        (tmp_path / name / "metrics.json").write_text(json.dumps(metrics))
    folders = [str(tmp_path / name) for name in ("a/one", "a/two", "b/two")]
    pictures = []
    for number, chosen in enumerate((folders[:1], folders[:2], folders)):
        out = tmp_path / "new" / f"{number}.png"
        assert curves([*chosen, "--out", str(out)]) == 0
        assert capsys.readouterr().out == f"{out}\n"
        pictures.append(matplotlib.image.imread(out)[..., :3])
        assert min(pictures[-1].shape[:2]) > 300
    # orange and light blue: each more run adds a colour
    for number, color in enumerate(("#E69F00", "#56B4E9"), 1):
        rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        counts = [(abs(picture - rgb) < 0.01).all(-1).sum() for picture in pictures]
        assert [count > 200 for count in counts] == [i >= number for i in range(3)]


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "no such file"),
        ("{", "not what the test"),
        ('{"top1": 1.0}', "not what the test"),
        ("[]", "not what the test"),
    ],
)
def test_curves_of_what_is_no_run(tmp_path, content, message):
    if content is not None:
        (tmp_path / "metrics.json").write_text(content)
    with pytest.raises(DataError, match=f"^{tmp_path}/metrics.json: {message}"):
        curves([str(tmp_path), "--out", str(tmp_path / "c.png")])
    assert not (tmp_path / "c.png").exists()
