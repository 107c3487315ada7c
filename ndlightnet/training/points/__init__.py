"""Clouds of points: completion and classification."""

COMMANDS = {
    "point_completion": {
        "line": "complete clouds of points of which a part is seen",
        "task": "points.completion_task:CompletionTask",
        "data": "points.cloud_data:PartialClouds",
        "config": "made_shapes",
    },
    "point_cls": {
        "line": "classify clouds of points",
        "task": "points.point_cls_task:PointClsTask",
        "data": "points.cloud_data:CloudFolders",
        "config": "shape_classes",
    },
}
