"""torch's Embedding, which names a number out of range."""

from __future__ import annotations

from torch import Tensor, nn


class Embedding(nn.Embedding):
    """nn.Embedding of numbers that a user calls `argument`. On a CPU it raises a ValueError where
    one is out of range, in eager mode; on a GPU, which would have to wait for the numbers, torch's
    assertion ends the process."""

    def __init__(self, num_embeddings: int, embedding_dim: int, argument: str) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.argument = argument

    def forward(self, input: Tensor) -> Tensor:
        try:
            return super().forward(input)
        except IndexError as error:
            raise ValueError(
                f"{self.argument} {tuple(input.shape)} with numbers from {input.min()} to "
                f"{input.max()}: expected 0 to {self.num_embeddings - 1}"
            ) from error
