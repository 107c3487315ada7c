"""Segmentation of volumes: the task, its data, and the results of tests and predictions."""

COMMANDS = {
    "ct_segmentation": {
        "line": "segment volumes (CT, MRI, several channels)",
        "task": "segmentation.segmentation_task:SegmentationTask",
        "data": "segmentation.volume_data:VolumeData",
        "config": "phantoms",
        "commands": {
            "plan": "segmentation.plan:plan",
            "folds": "segmentation.cross_validation:folds",
            "bundle": "segmentation.bundle:bundle",
        },
    }
}
