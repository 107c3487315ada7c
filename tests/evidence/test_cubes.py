"""The command `cubes`, what of it needs no card: how the largest cube is found, its table."""

from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

import cubes


@pytest.mark.parametrize("most", [32, 250, 256, 257, 700, 2048])
def test_largest_is_the_last_that_works(monkeypatch, most):
    tried = []

    def action(net: nn.Module, side: int) -> None:
        tried.append(side)
        if side > most:
            raise torch.OutOfMemoryError("CUDA out of memory, tried to allocate")

    monkeypatch.setattr(cubes, "gc", MagicMock())  # it takes most of the time
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3e9)
    found = cubes.largest(action, nn.Identity())
    assert found["largest"] == min(most, 63 * 32) // 32 * 32 and found["gb"] == 3.0
    assert len(set(tried)) <= 9  # by bisection
    if most < 63 * 32:
        assert found["next"] == "out of memory" and found["largest"] + 32 in tried


def test_a_cube_of_mirrored_copies():
    image = torch.randn(2, 5, 3, 9)
    cube = cubes.cube(image, 7)
    assert cube.shape == (2, 7, 7, 7)
    assert torch.equal(cube[:, :5, :3], image[..., :7])
    assert torch.equal(cube[:, 5:, :3], image[:, 3:].flip(1)[..., :7])
    assert torch.equal(cube[:, :5, 6:], image[:, :, :1, :7])  # forth, back and forth again
    assert torch.equal(cube[:, :5, 3:6], image.flip(2)[..., :7])


def test_what_is_measured_and_its_table(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(cubes, "run", lambda o, who: asked.append(who) or {"gb": 1.23456})
    command = ["--nets", "SegResNet", "DynUNet", "--sides", "64", "--largest", "--out"]
    cubes.main([*command, str(tmp_path)])
    ways = [
        ("SegResNet", 64, "whole"),
        ("SegResNet", 64, "windows of 128"),
        ("SegResNet", None, "largest prediction"),
        ("SegResNet", None, "largest training"),
    ]
    assert [(who["row"], who.get("side"), who["what"]) for who in asked[:4]] == ways
    assert len(asked) == 8 and {who["row"] for who in asked[4:]} == {"DynUNet"}
    table = (tmp_path / "table.md").read_text().splitlines()
    assert [cell.strip() for cell in table[0].split("|")[1:-1]] == ["row", "side", "what", "gb"]
    assert "1.235" in table[2] and "date" not in table[0]
    asked.clear()
    cubes.main(["--classes", "100", "--sides", "32", "--out", str(tmp_path)])
    assert asked == [{"row": "NDLightUNet S", "side": 32, "what": "from file to file"}]


def test_from_file_to_file(monkeypatch, tmp_path):
    """And the memory of the host that it takes."""
    net = nn.Conv3d(1, 3, 1)
    monkeypatch.setitem(cubes.NETS, "NDLightUNet S", lambda classes: net)
    found = cubes.whole_way(3, 24, 16)
    assert found["seconds"] > 0 and found["inputs"] >= 0
    assert cubes.peak_of(lambda: torch.ones(50_000_000)) > 190e6  # 4 bytes each
