"""Figures in one palette, with texts in any script that an installed font has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ndlightnet.data.errors import atomic_write, printable

# Okabe and Ito's palette, which colour-blind people can distinguish, too
COLORS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#F0E442", "#CC79A7", "#0072B2")
RIGHT, WRONG = "#1a7f37", "#cf222e"  # answers
BLUE, GREY, LIGHT = "#0969da", "#777777", "#DDDDDD"  # a line, one to compare with, a grid
# of Linux, macOS and Windows, with scripts that matplotlib's own font lacks
FONTS = re.split(
    r",\s+",
    """Noto Sans CJK SC, Noto Sans CJK JP, Noto Sans CJK TC, Noto Sans CJK KR, Noto Sans SC, Source Han Sans SC,
WenQuanYi Micro Hei, WenQuanYi Zen Hei, Droid Sans Fallback, PingFang SC, PingFang HK, Hiragino Sans GB, Heiti TC,
Arial Unicode MS, Apple SD Gothic Neo, Microsoft YaHei, SimHei, Yu Gothic, Malgun Gothic, Nirmala UI, Leelawadee UI,
Noto Sans Devanagari, Noto Sans Thai, Noto Sans Arabic, Noto Sans Hebrew, Noto Sans""",
)


@cache
def characters() -> dict[str, frozenset[str]]:
    """Return the characters of each font: matplotlib's default, then those of FONTS."""
    from matplotlib import font_manager, rcParams

    installed = {font.name for font in font_manager.fontManager.ttflist}
    families = [*rcParams["font.family"], *(name for name in FONTS if name in installed)]
    paths = [font_manager.findfont(font_manager.FontProperties([name])) for name in families]
    return {
        family: frozenset(map(chr, font_manager.get_font(path).get_charmap()))
        for family, path in zip(families, paths, strict=True)
    }


def has_glyph(character: str) -> bool:
    return character.isascii() or any(character in some for some in characters().values())


def figure_names(names: Sequence[str]) -> list[str]:
    """Return the names of classes for figures: a name that no font can draw is its number, #3."""
    return [name if all(map(has_glyph, printable(name))) else f"#{number}" for number, name in enumerate(names)]


def page_names(names: Sequence[str]) -> list[str]:
    """Return the names of classes for the page around figures: with the number, if they show it."""
    pairs = zip(names, figure_names(names), strict=True)
    return [name if name == drawn else f"{name} ({drawn})" for name, drawn in pairs]


def plain_text(figure: Any) -> None:
    """Make the texts of a finished figure literal, such as names of files and classes: `$` begins
    no formula, bytes that are not UTF-8 are escaped, and a character of no font is `?`."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
        literal = text.get_text().encode(errors="backslashreplace").decode()
        if not literal.isascii():
            text.set_fontfamily(list(characters()))
            literal = "".join(x if has_glyph(x) else "?" for x in literal)
        text.set_text(literal)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure, its texts treated by `plain_text`, and close it."""
    import matplotlib.pyplot as plt

    plain_text(figure)
    with atomic_write(path) as draft:
        figure.savefig(draft, format="png", dpi=110, bbox_inches="tight", facecolor=figure.get_facecolor())
    plt.close(figure)


def panels_of(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """Return a figure of a size in inches and its axes (rows, columns)."""
    import matplotlib

    matplotlib.use("Agg")  # no window, whatever machine this is
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", facecolor="white")


def plain_axes(axis: Any) -> None:
    """Leave the grid and the lower and left side of a panel of curves."""
    axis.grid(color=LIGHT, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
