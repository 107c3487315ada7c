"""Texts of which some tokens are hidden, in windows or whole documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ndlightnet.data.errors import DataError
from ndlightnet.data.sampling import mixed, seeded_draws
from ndlightnet.data.text.tokenizer import MASKS, Tokenizer
from ndlightnet.data.text.tokens import Windows
from ndlightnet.layout import Packed, pack
from ndlightnet.training.core.options import check
from ndlightnet.training.language.text_data import TextData

MASKED, REPLACED = 0.8, 0.1  # of the hidden tokens; the rest stay as they are
SEED = 0  # of the tokens that are hidden to validate and to test, whatever that of the training


class HiddenTokens(Dataset[tuple[Tensor, Tensor, Tensor, int]]):
    """Texts (tokens,) with hidden tokens: item i is (tokens, places, labels, i): (tokens,) int64, and of each hidden
    token its place and what it was, (hidden,) int64: `fraction` of a text's length. 80 % of them become the mask, 10 %
    any token. It draws from torch's global generator, with a `seed` always the same for an item."""

    def __init__(self, texts: Any, fraction: float, tokenizer: Tokenizer, seed: int | None = None) -> None:
        self.texts, self.fraction, self.tokenizer, self.seed = texts, fraction, tokenizer, seed

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, int]:
        item = self.texts[index]
        tokens = item[0] if isinstance(item, tuple) else item
        if self.seed is None:
            return *self._hide(tokens), index
        with seeded_draws(mixed(self.seed, 4, index)):
            return *self._hide(tokens), index

    def _hide(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count = max(1, round(self.fraction * len(tokens)))
        places = torch.randperm(len(tokens))[:count]
        labels, draws = tokens[places], torch.rand(count)
        words = torch.randint(self.tokenizer.vocab_size, (count,)).where(draws < MASKED + REPLACED, labels)
        tokens = tokens.clone()
        tokens[places] = words.masked_fill(draws < MASKED, self.tokenizer.mask or 0)
        return tokens, places, labels


def collate_hidden(
    items: Sequence[tuple[Tensor, Tensor, Tensor, int]], join: Callable[..., Packed | Tensor] = torch.stack
) -> tuple[Packed | Tensor, ...]:
    """Return texts that `join` makes a batch (batch, length) or a pack, the places of the hidden tokens among all
    tokens of the batch, and their labels, (hidden,) int64 each, and the numbers of the texts, (batch,) int64."""
    texts, places, labels, numbers = zip(*items, strict=True)
    starts = accumulate(map(len, texts[:-1]), initial=0)
    flat = torch.cat([place + start for place, start in zip(places, starts, strict=True)])
    return join(texts), flat, torch.cat(labels), torch.tensor(numbers)


class MaskedTextData(TextData):
    """Texts of TextData with hidden tokens; the tokenizer has a token for them.

    Args:
        root: as in TextData, as all others but those below.
        length: tokens of a window, or the most of a document.
        hidden: fraction of the tokens that are hidden.
        test_tokens: at most so many tokens of the test text, whose hidden ones are always the same.
    """

    margin = 0

    def __init__(
        self,
        root: str,
        fractions: tuple[float, float, float] = (0.98, 0.01, 0.01),
        length: int = 128,
        windows: int = 2**17,
        batch_size: int = 1024,
        workers: int = 2,
        hidden: float = 0.25,
        **kwargs: Any,
    ) -> None:
        check("data.hidden", hidden, 0 < hidden < 1, "a fraction between 0 and 1")
        check("data.length", length, length > 1, "2 or more tokens")
        super().__init__(root, fractions, length, windows, batch_size, (length,), workers=workers, **kwargs)
        self.hidden = hidden

    def setup(self, stage: str) -> None:
        super().setup(stage)
        tokenizer = self.loaded_tokenizer()
        if tokenizer.mask is None:
            expected = f"one with a token {', '.join(MASKS)}, such as `tokenize --train` makes"
            raise DataError(f"data.tokenizer: has no token that hides another, expected {expected}")
        self.train_set = HiddenTokens(self.train_set, self.hidden, tokenizer)
        self.val_set = HiddenTokens(self.val_set, self.hidden, tokenizer, SEED)
        windows = Windows(self.splits[2].part(0, self.tested), self.length, 0)
        self.test_set = HiddenTokens(windows, self.hidden, tokenizer, SEED)

    collate = staticmethod(collate_hidden)

    @staticmethod
    def pack_documents(documents: Sequence[Any]) -> tuple[Any, ...]:
        return collate_hidden(documents, pack)

    def test_dataloader(self) -> Any:
        return self.still_loader(self.test_set)
