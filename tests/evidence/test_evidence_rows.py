"""The rows of a comparison: named ones, mixers with their scans, files."""

import inspect
import json
from pathlib import Path

import pytest
import torch

import diagrams
from ndlightnet import NDLightNet
from ndlightnet.nn import mixers
from ndlightnet_evidence import catalogue
from ndlightnet_evidence.line import Line

CONFIGS = Path(__file__).parents[2] / "tasks/evidence/configs"
NETS = {
    "ladder/text": {"dims": 1, "vocab_size": 256, "causal": True, "depth": 6, "embed_dim": 96},
    "ladder/language": {"dims": 1, "vocab_size": 256, "causal": True, "depth": 1, "embed_dim": 96},
    "ladder/grids": {"dims": 2, "in_chans": 1, "num_classes": 3, "patch_size": 1, "depth": 1, "embed_dim": 96},
    "images/pathfinder": {"dims": 2, "in_chans": 1, "num_classes": 2, "patch_size": 1, "depth": 6, "embed_dim": 128},
    "images/cifar10": {"dims": 2, "num_classes": 10, "patch_size": 4, "depth": 1, "embed_dim": 96},
}
ROWS = [(file, row) for file in NETS for row in catalogue.changes(CONFIGS / f"{file}.yaml", None)]


def test_the_family_is_the_whole_catalogue_with_every_scan():
    rows = catalogue.family()
    scanned = [m for m in mixers.__all__ if "scan" in inspect.signature(getattr(mixers, m)).parameters]
    assert len(rows) == len(set(rows)) == len(mixers.__all__) + 2 * len(scanned)
    for row in rows:
        (argument,) = catalogue.overrides(row)
        option, _, value = argument.partition("=")
        config, (name, _, scan) = json.loads(value), row.partition(" ")
        assert option == "--model.net.init_args.mixer" and config["class_path"] == f"ndlightnet.nn.mixers.{name}"
        assert config["init_args"] == ({"scan": scan} if scan else {})
        built = catalogue.resolve(config)(64)
        assert type(built) is getattr(mixers, name) and getattr(built, "scan", scan) == scan


@pytest.mark.parametrize(
    "row, text",
    [
        ("LightNet axes", "expected LightNet, softmax attention, "),
        ("GLA zigzag", "expected GLA, GLA raster, GLA both, GLA axes"),
        ("GLA both axes", "expected GLA, GLA raster"),
        ("GLA ", "expected GLA, GLA raster"),
        ("LightNetAttention both", "expected LightNetAttention"),
        ("Nothing", "axis-causal, padded, "),
    ],
)
def test_a_row_that_does_not_exist_is_refused(row, text):
    for read in (catalogue.overrides, lambda row: catalogue.changes(None, [row])):
        with pytest.raises(ValueError) as caught:
            read(row)
        assert str(caught.value).startswith(f"row {row!r}: ") and text in str(caught.value)


@pytest.mark.parametrize("path", ["ndlightnet.nn.mixers.Nothing", "ndlightnet.nowhere.Nothing"])
def test_a_class_that_does_not_exist_is_refused(tmp_path, path):
    (tmp_path / "rows.yaml").write_text(f"odd: {{mixer: [{path}]}}")
    with pytest.raises(ValueError, match=f"{path}: no such class"):
        catalogue.changes(tmp_path / "rows.yaml", None)


@pytest.mark.parametrize("file, row", ROWS, ids=" ".join)
def test_a_row_of_a_file_builds_its_network(file, row):
    change = catalogue.changes(CONFIGS / f"{file}.yaml", [row])[row]
    net = catalogue.network({"class_path": "ndlightnet.NDLightNet", "init_args": NETS[file]}, change)
    if "net" not in change:
        assert (net.tpe is None) == (change.get("tpe") is False) and len(net.blocks) == NETS[file]["depth"]


@pytest.mark.parametrize(
    "file, width, paper, before",
    [
        ("grids", 128, "LightNet as published", "published, "),
        ("text", 384, "LightNet as published", "published, "),
        ("language", 512, "LightNet", ""),
    ],
)
def test_ablations_of_the_papers_network_change_one_thing(file, width, paper, before):
    """What each adds to or takes from the parameters; all else has the same names and shapes."""
    rows = catalogue.changes(CONFIGS / f"ladder/{file}.yaml", None)
    changed = {"without MD-LRPE": "lrpe", "without MD-TPE": "tpe", "no share": "decay_proj"}
    nets = {
        row: catalogue.network(
            {"class_path": "ndlightnet.NDLightNet", "init_args": NETS[f"ladder/{file}"] | {"embed_dim": width}},
            rows[row],
        )
        for row in (paper, *(before + change for change in changed))
        if row in rows
    }
    shapes = {row: {(name, p.shape) for name, p in net.named_parameters()} for row, net in nets.items()}
    assert nets[paper].tpe.published
    assert len(nets) == 4 - (file == "grids")  # where a scan of a grid would be a second change
    for change, part in changed.items():
        if before + change not in nets:
            continue
        different = shapes[paper] ^ shapes[before + change]
        assert different and all(part in name.split(".") for name, _ in different)
        assert change == "without MD-TPE" or nets[before + change].tpe.published


def test_a_line_reads_a_picture_row_after_row(close):
    net, x = Line(in_chans=2, num_classes=3, patch_size=1, embed_dim=16, depth=1).eval(), torch.randn(2, 2, 3, 4)
    close(net(x), NDLightNet.forward(net, torch.cat([x[:, :, row] for row in range(3)], -1)), 1e-6)


def test_the_diagrams_show_the_times_of_the_table(tmp_path):
    assert [float(time.removesuffix(" ms")) > 0 for time in diagrams.times()] == [True] * 3
    diagrams.main(["--out", str(tmp_path)])
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("one_scan", "block"))
