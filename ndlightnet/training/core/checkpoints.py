"""Checkpoints that appear complete or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from ndlightnet.data.errors import whole_file


class WholeCheckpoints(TorchCheckpointIO):
    """Lightning's, but what it writes in TMPDIR and moves is written beside its place and renamed:
    from another file system a move is a copy, which a kill or a full disk cuts off."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """DataError where it cannot be written; the checkpoint of this name stays as it was."""
        with whole_file(Path(path)) as draft, draft.open("wb") as file:
            torch.save(checkpoint, file)
