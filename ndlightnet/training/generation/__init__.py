"""Generation of images, clips and volumes by diffusion."""

COMMANDS = {
    "image_gen": {
        "line": "generate images, clips and volumes by diffusion",
        "task": "generation.generation_task:GenerationTask",
        "data": "core.data_module:LabelledData",
        "config": "handwritten_gen",
    }
}
