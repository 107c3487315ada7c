"""The script for 3D Slicer, with a stand-in for Slicer's module."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

SCRIPT = Path(__file__).parents[3] / "tasks" / "open_in_slicer.py"


def segment(label: int) -> SimpleNamespace:
    """A segment of Slicer's with an attribute `name`."""
    one = SimpleNamespace(name=f"Segment_{label}", GetLabelValue=lambda: label)
    one.SetName = lambda name: setattr(one, "name", name)
    return one


def test_segments_get_the_names_of_their_labels(tmp_path, monkeypatch):
    """Also where a class is absent from the labels."""
    lines = [f"{case},{name}," for case in "ab" for name in ("liver", "spleen", "kidney")]
    (tmp_path / "cases.csv").write_text("\n".join(["case,class,dice", *lines, ""]))
    segments, opened = [segment(1), segment(3), segment(4)], []
    inside = SimpleNamespace(GetNumberOfSegments=lambda: len(segments), GetNthSegment=segments.__getitem__)
    node = SimpleNamespace(
        GetSegmentation=lambda: inside, CreateClosedSurfaceRepresentation=lambda: opened.append("surfaces")
    )
    util = SimpleNamespace(
        loadVolume=opened.append,
        loadSegmentation=lambda path: (opened.append(path), node)[1],
        resetSliceViews=lambda: opened.append("views"),
    )
    monkeypatch.setitem(sys.modules, "slicer", SimpleNamespace(util=util))
    spec = importlib.util.spec_from_file_location("open_in_slicer", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    labels = str(tmp_path / "a.nii.gz")
    assert script.show("scan.nii.gz", labels) is node
    assert [segment.name for segment in segments] == ["liver", "kidney", "Segment_4"]
    assert opened == ["scan.nii.gz", labels, "surfaces", "views"]
    (tmp_path / "cases.csv").unlink()
    assert script.class_names(Path(labels)) == []
