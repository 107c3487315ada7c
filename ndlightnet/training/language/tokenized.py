"""What all tasks on text share: the tokenizer, which data read and checkpoints hold."""

from __future__ import annotations

from typing import Any

from ndlightnet.data.errors import DataError
from ndlightnet.data.text.tokenizer import Tokenizer, parse_tokenizer
from ndlightnet.training.core.data_module import DataModule
from ndlightnet.training.core.options import check
from ndlightnet.training.core.task import Task


class TokenizedData(DataModule):
    """Base class of data of text. `tokenizer` is None until `setup` loads it, or a checkpoint for `predict`."""

    tokenizer: Tokenizer | None = None

    def loaded_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. DataError if none was loaded: predictions need a checkpoint."""
        if self.tokenizer is None:
            raise DataError("--ckpt_path: got none, expected the checkpoint of a training")
        return self.tokenizer


class TokenizedTask(Task):
    """Base class of tasks on TokenizedData."""

    saved = (*Task.saved, "tokenizer")

    def setup(self, stage: str) -> None:
        """Check that the network has a number for every token. (The data are set up first.)"""
        tokenizer, vocabulary = self.data().tokenizer, getattr(self.net, "vocab_size", None)
        if tokenizer is not None and vocabulary is not None:
            enough = vocabulary >= tokenizer.vocab_size
            check("model.net.vocab_size", vocabulary, enough, f"{tokenizer.vocab_size} or more, those of the tokenizer")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["tokenizer"] = self.data().loaded_tokenizer().text

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        data, saved = self.data(), parse_tokenizer(checkpoint["tokenizer"], "the checkpoint's tokenizer")
        data.tokenizer = data.tokenizer or saved
        if data.tokenizer.digest != saved.digest:
            sizes = f"{data.tokenizer.vocab_size} tokens, but the checkpoint was trained on those of another"
            raise DataError(f"{data.root}: has a tokenizer of {sizes}, of {saved.vocab_size}")
        super().on_load_checkpoint(checkpoint)
