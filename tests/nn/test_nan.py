"""How far back NaN in a later token reaches in the causal form, by mixer: README.md says the same.
(A product with a triangular matrix multiplies what it hides by 0, and 0 * NaN is NaN.)"""

import pytest
import torch

from ndlightnet.nn import mixers

from .mixer_cases import CAUSAL

TO_ITS_CHUNK = ["DeltaNet", "GatedDeltaNet", "KimiDeltaAttention"]
TO_ITS_PART = ["S4"]  # chunks of equal length: of 50 tokens of text, of 45 of video
TO_ITS_TILE = ["WindowAttention", "LAVO", "LongShortAttention"]
TO_ALL = ["SoftmaxAttention"]
ELSEWHERE = (100, 6)  # not at all


def first_that_is_broken(name: str, *shape: int, at: int) -> int:
    """The first frame whose outputs are not finite, with NaN in a token of frame `at`."""
    m, x = getattr(mixers, name)(16), torch.randn(1, *shape, 16)
    x[(0, at, *[0] * (len(shape) - 1))] = torch.nan
    broken = ~m(x, causal=True).isfinite().flatten(2).all(2)[0]
    return int(broken.int().argmax()) if broken.any() else shape[0]


@pytest.mark.parametrize("name", CAUSAL)
def test_how_far_back_nan_reaches(name):
    """Text of 150 tokens, in chunks and tiles of 64; video of 10 frames of 3 x 3 tokens."""
    text, video = (first_that_is_broken(name, 150, at=100), first_that_is_broken(name, 10, 3, 3, at=6))
    expected = {
        **dict.fromkeys(TO_ITS_CHUNK, (64, 0)),
        **dict.fromkeys(TO_ITS_PART, (100, 5)),
        **dict.fromkeys(TO_ITS_TILE, (64, 4)),
        **dict.fromkeys(TO_ALL, (0, 0)),
    }
    assert (text, video) == expected.get(name, ELSEWHERE)
