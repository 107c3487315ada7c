"""The name that was probably meant, for options and mixers alike."""

import pytest

from ndlightnet.layout.spelling import did_you_mean
from ndlightnet.nn.mixers.names import named_mixer

MIXERS = ["GLA", "Mamba", "TNL"]


@pytest.mark.parametrize(
    ("name", "names", "expected"),
    [
        ("gla", MIXERS, "GLA"),
        ("TLN", MIXERS, "TNL"),
        ("spatial_dims", ["depth", "dims"], "dims"),
        ("wrong", MIXERS, ""),
    ],
)
def test_nearest(name, names, expected):
    assert did_you_mean(name, names, "") == expected
    hint = f"did you mean {expected}?" if expected else "expected one of GLA, Mamba, TNL"
    assert did_you_mean(name, names) == f"; {hint}"


def test_a_mixer_is_asked_for_by_another_librarys_words():
    with pytest.raises(ValueError, match="GLA has no 'n_heads', did you mean 'heads'"):
        named_mixer("mixer", {"GLA": {"n_heads": 4}})
