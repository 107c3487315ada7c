"""Learning without labels."""

COMMANDS = {
    "pretrain": {
        "line": "learn from images, videos or volumes without labels",
        "task": "pretraining.pretrain_task:PretrainTask",
        "data": "core.data_module:LabelledData",
        "config": "coloured_digits_pretrain",
        "trainings": ("fit", "validate", "test"),
    }
}
