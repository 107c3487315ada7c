"""The rows of configs/ladder build networks that can be trained, on the data that they are for."""

from pathlib import Path

import pytest
import torch
import yaml

from ndlightnet_evidence import catalogue

LADDER = Path(__file__).parents[2] / "tasks/evidence/configs/ladder"
ROWS = {name: yaml.safe_load((LADDER / f"{name}.yaml").read_text()) for name in ("grids", "text", "video")}
TEXT = {"dims": 1, "vocab_size": 256, "causal": True, "depth": 6}
IMAGES = {"dims": 2, "in_chans": 1, "num_classes": 3, "patch_size": 1, "depth": 1}
VIDEOS = {"dims": 3, "in_chans": 1, "num_classes": 3, "patch_size": 2, "depth": 1}


@pytest.mark.parametrize(
    "net, shape, file, row",
    [
        (net, shape, file, row)
        for net, shape, file in (
            (TEXT, (1, 20), "text"),
            (IMAGES, (1, 1, 5, 9), "grids"),
            (VIDEOS, (1, 1, 6, 5, 8), "grids"),
            (VIDEOS, (1, 1, 6, 5, 8), "video"),
        )
        for row in ROWS[file]
        if not row.startswith(".")
    ],
)
def test_a_row_can_be_trained(net, shape, file, row):
    torch.manual_seed(0)
    given = {"class_path": "ndlightnet.NDLightNet", "init_args": {**net, "embed_dim": 96}}
    built = catalogue.network(given, ROWS[file][row])
    x = torch.randint(256, shape) if file == "text" else torch.randn(shape)
    built(x).square().mean().backward()
    grads = [p.grad for p in built.parameters() if p.requires_grad]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)
