"""Results of a run for people: metrics.json and pictures. A file appears complete or not at
all."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_only

from ndlightnet.data.errors import atomic_write, printable, writable
from ndlightnet.training.core.fonts import characters, has_glyph

# Okabe and Ito's palette, which colour-blind people can distinguish, too
COLORS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#F0E442", "#CC79A7", "#0072B2")


def tell(notes: Sequence[str]) -> None:
    """Print `notes`, what was decided for the user, each line once, in every process."""
    for note in dict.fromkeys(notes):
        print(f"note: {printable(note)}", file=sys.stderr)


@rank_zero_only
def say(notes: Sequence[str]) -> None:
    """Print `notes` in the first process."""
    tell(notes)


def check_writable(folder: Path) -> None:
    """Raise DataError if results could not be written to `folder` later."""
    probe = folder / f".{os.getpid()}.writable"  # by process: several may check at once
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("written")  # a full disk accepts an empty file
        probe.unlink()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON, floats with 6 decimals; numbers that are not finite become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        if isinstance(value, float):
            return round(value, 6) if np.isfinite(value) else None
        return value

    with atomic_write(path) as draft:
        draft.write_text(json.dumps(plain(content), indent=2) + "\n")


def write_metrics(folder: Path, test: dict[str, Any] | None = None, fit: dict[str, Any] | None = None) -> None:
    """Write a run's metrics.json: what `test` measures, and under "fit" what a training does. None:
    as the file there has it."""
    path, saved = folder / "metrics.json", {}
    if path.is_file():
        with suppress(ValueError):  # not JSON: replaced
            saved = json.loads(path.read_bytes())
        if not isinstance(saved, dict):
            saved = {}
    trained = saved.pop("fit", None)
    trained = trained if fit is None else fit
    write_json(path, {**(saved if test is None else test), **({"fit": trained} if trained else {})})


def plain_text(figure: Any) -> None:
    """Make the texts of a finished figure literal, such as names of files and classes: `$` begins
    no formula, bytes that are not UTF-8 are escaped, and a character of no font is `?`."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
        shown = text.get_text().encode(errors="backslashreplace").decode()
        if not shown.isascii():
            text.set_fontfamily(list(characters()))
            shown = "".join(x if has_glyph(x) else "?" for x in shown)
        text.set_text(shown)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure, its texts treated by `plain_text`, and close it."""
    import matplotlib.pyplot as plt

    plain_text(figure)
    with atomic_write(path) as draft:
        figure.savefig(draft, dpi=110, bbox_inches="tight", facecolor=figure.get_facecolor())
    plt.close(figure)


def panels_of(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")  # no window, whatever machine this is
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
