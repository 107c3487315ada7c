"""What every reader owes for a bad input."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ndlightnet.data.errors import DataError


def refuses(act: Callable[[], Any], path: Path | None, words: str | None = None, noise: Sequence[str] = ()) -> str:
    """A DataError of one line that starts with the path and says what is wrong, without the words of `noise`: return
    the line."""
    with pytest.raises(DataError, match=words) as caught:
        act()
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1000 and not any(word in message for word in noise)
    if path is not None:
        assert message.startswith(f"{path}:"), message
    return message
