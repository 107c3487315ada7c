"""Open a scan and the labels of a prediction in 3D Slicer, with the names of the classes.

Slicer --python-script tasks/open_in_slicer.py scan.nii.gz runs/NAME/predictions/CASE.nii.gz

Or in Slicer's Python console: exec(open("tasks/open_in_slicer.py").read()), then
show("scan.nii.gz", "runs/NAME/predictions/CASE.nii.gz"). The names come from the file cases.csv
beside the labels, if it is there. Needs nothing but Slicer.
"""

import csv
import sys
from pathlib import Path
from typing import Any


def class_names(labels: Path) -> list[str]:
    """Return the names of the classes from 1 on, in the order of cases.csv; empty without it."""
    table = labels.parent / "cases.csv"
    if not table.is_file():
        return []
    with table.open(newline="", encoding="utf-8") as file:
        return list(dict.fromkeys(row["class"] for row in csv.DictReader(file)))


def show(scan: str, labels: str) -> Any:
    """Load both files, name the segments, show them as surfaces; return the segmentation's node."""
    import slicer  # type: ignore[import-not-found]

    slicer.util.loadVolume(scan)
    node = slicer.util.loadSegmentation(labels)
    segmentation, names = node.GetSegmentation(), class_names(Path(labels))
    for number in range(segmentation.GetNumberOfSegments()):
        segment = segmentation.GetNthSegment(number)
        if segment.GetLabelValue() <= len(names):
            segment.SetName(names[segment.GetLabelValue() - 1])
    node.CreateClosedSurfaceRepresentation()
    slicer.util.resetSliceViews()
    return node


if __name__ == "__main__" and len(sys.argv) == 3:
    show(*sys.argv[1:])
