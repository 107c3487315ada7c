"""Classification of images, videos, volumes and signals."""

COMMANDS = {
    "image_cls": {
        "line": "classify images, in colour or grey",
        "task": "classification.image_task:ImageTask",
        "data": "core.data_module:LabelledData",
        "config": "coloured_digits",
    },
    "video_cls": {
        "line": "classify videos, of files or a camera",
        "task": "classification.video_task:VideoTask",
        "data": "classification.video_data:VideoData",
        "config": "digits",
        "trainings": ("fit", "validate", "test", "predict", "stream"),
    },
    "volume_cls": {
        "line": "classify volumes (CT, MRI)",
        "task": "classification.image_task:ImageTask",
        "data": "classification.image_data:ImageData",
        "config": "adrenal28",
    },
    "signal_cls": {
        "line": "classify signals of different lengths",
        "task": "classification.signal_task:SignalTask",
        "data": "classification.signal_data:SignalData",
        "config": "spoken_digits",
        "trainings": ("fit", "validate", "test"),
    },
}
