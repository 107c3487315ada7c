"""Texts of figures in any script: the installed fonts that have their characters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from ndlightnet.data.errors import printable

# of Linux, macOS and Windows, with scripts that matplotlib's own font lacks
FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans CJK TC",
    "Noto Sans CJK KR",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Droid Sans Fallback",
    "PingFang SC",
    "PingFang HK",
    "Hiragino Sans GB",
    "Heiti TC",
    "Arial Unicode MS",
    "Apple SD Gothic Neo",
    "Microsoft YaHei",
    "SimHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Nirmala UI",
    "Leelawadee UI",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Noto Sans Arabic",
    "Noto Sans Hebrew",
    "Noto Sans",
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
    return [name if name == shown else f"{name} ({shown})" for name, shown in pairs]
