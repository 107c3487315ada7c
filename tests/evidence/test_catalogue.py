"""The rows of a comparison: named ones, mixers with their scans, files."""

import inspect
import json
from pathlib import Path

import pytest
import torch

from ndlightnet.nn import mixers
from ndlightnet_evidence import catalogue

VOLUMES = Path(__file__).parents[2] / "tasks/evidence/configs/volumes"
SEQUENTIAL = [name for name in mixers.__all__ if "scan" in inspect.signature(getattr(mixers, name)).parameters]


def mixer_of(arguments: list[str]) -> dict[str, object]:
    """What a row's only argument says."""
    name, _, value = arguments[0].partition("=")
    assert len(arguments) == 1 and name == "--model.net.init_args.mixer"
    return json.loads(value)


def test_a_row_for_every_mixer():
    for name in mixers.__all__:
        found = mixer_of(catalogue.overrides(name))
        assert found == {"class_path": f"ndlightnet.nn.mixers.{name}", "init_args": {}}


class InTurn(torch.nn.Module):
    """What a mixer that reads tokens in turn looks like from outside."""

    def __init__(self, dim: int, *, scan: str = "both") -> None:
        super().__init__()
        self.scan = scan


@pytest.fixture
def four(monkeypatch):
    """A catalogue of four mixers, one of which reads tokens in turn."""
    monkeypatch.setattr(mixers, "InTurn", InTurn, raising=False)
    names = ["InTurn", "LightNetAttention", "SoftmaxAttention", "Identity"]
    monkeypatch.setattr(mixers, "__all__", names)


@pytest.mark.parametrize("scan", ["raster", "both", "axes"])
def test_a_row_for_every_scan(four, scan):
    found = mixer_of(catalogue.overrides(f"InTurn {scan}"))
    path = "ndlightnet.nn.mixers.InTurn"
    assert found == {"class_path": path, "init_args": {"scan": scan}}
    assert catalogue.factory(f"InTurn {scan}")(16).scan == scan


def test_the_family(four):
    assert catalogue.family() == [
        "Identity",
        "SoftmaxAttention",
        "LightNetAttention",
        "InTurn raster",
        "InTurn both",
        "InTurn axes",
    ]


def test_the_family_is_the_whole_catalogue():
    rows = catalogue.family()
    assert len(rows) == len(set(rows)) == len(mixers.__all__) + 2 * len(SEQUENTIAL)
    for row in rows:
        found = mixer_of(catalogue.overrides(row))
        kind = getattr(mixers, str(found["class_path"]).rsplit(".")[-1])
        assert type(kind(64, **found["init_args"])) is type(catalogue.factory(row)(64))


@pytest.mark.parametrize(
    "row, text",
    [
        ("LightNet axes", "expected LightNet, softmax attention, "),
        ("InTurn zigzag", "expected InTurn, InTurn raster, InTurn both, InTurn axes"),
        ("InTurn both axes", "expected InTurn, InTurn raster"),
        ("InTurn ", "expected InTurn, InTurn raster"),
        ("LightNetAttention both", "expected LightNetAttention"),
        ("Nothing", "single frame, padded, InTurn, LightNetAttention"),
    ],
)
def test_a_row_that_is_none(four, row, text):
    for read in (catalogue.overrides, catalogue.factory):
        with pytest.raises(ValueError) as caught:
            read(row)
        assert str(caught.value).startswith(f"row {row!r}: ") and text in str(caught.value)


def test_the_files_of_volumes_are_rows():
    found = catalogue.named([str(path) for path in sorted(VOLUMES.glob("*.yaml"))])
    assert set(found) >= {"ndlightunet", "identity", "dynunet", "segresnet", "swinunetr"}
    assert all(option == "--config" and Path(path).stem == name for name, (option, path) in found.items())
