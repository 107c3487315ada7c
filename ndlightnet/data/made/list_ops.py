"""ListOps (Nangia and Bowman, 2018), as in the Long Range Arena (Tay et al., 2021, arXiv 2011.04006): the value, one
digit, of a nested expression of hundreds of symbols.

"[M29[m47]0]" is the maximum of 2, 9, the minimum of 4 and 7, and 0: M maximum, m minimum, d the lower median, s the sum
modulo 10. A symbol is one character, so that bytes are its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

from rich.progress import track

from ndlightnet.data.made.drawn_set import draw_once

VERSION = 2  # of the expressions; to be raised when a change gives others for the same arguments
OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "M": max,
    "m": min,
    "d": lambda values: sorted(values)[(len(values) - 1) // 2],
    "s": lambda values: sum(values) % 10,
}
LEAST = 5  # symbols of the shortest: [Mdd]
ATTEMPTS = 20000  # to draw a new expression of these lengths
ARGUMENTS, DEPTH = 10, 10  # most of an operator; most operators around a digit
NESTED = 0.25  # of the arguments are expressions


def make_list_ops(
    folder: Path,
    train: int = 96000,
    test: int = 2000,
    lengths: tuple[int, int] = (500, 2000),
    seed: int = 0,
    progress: bool = True,
) -> Path:
    """Write train.tsv and test.tsv, columns expression and value, of expressions with least to most `lengths` symbols,
    none twice; return `folder`. The same arguments give the same ones, and a set that exists is left as it is.
    DataError if the folder holds anything else; ValueError for fewer than one of either, and for lengths that no or too
    few expressions have."""
    least, most = lengths
    if min(train, test) < 1 or not LEAST <= least <= most:
        raise ValueError(f"train={train}, test={test}, lengths={lengths}: expected 1 or more, and 5 <= least <= most")

    def draw(draft: Path) -> None:
        rng, seen = Random(seed), set[str]()  # single draws of NumPy take several times as long
        for name, count in (("train", train), ("test", test)):
            with open(draft / f"{name}.tsv", "w", encoding="utf-8", newline="") as file:
                file.write("expression\tvalue\n")
                for _ in track(range(count), f"drawing ListOps, {name}", disable=not progress):
                    drawn = (draw_expression(rng, least, most) for _ in range(ATTEMPTS))
                    text, value = next((one for one in drawn if one[0] not in seen), ("", 0))
                    if not text:
                        raise ValueError(f"lengths={lengths}: expected more than {len(seen)} expressions to exist")
                    seen.add(text)
                    file.write(f"{text}\t{value}\n")

    record = {"version": VERSION, "train": train, "test": test, "lengths": [least, most], "seed": seed}
    return draw_once(folder, record, draw)


def draw_expression(rng: Random, least: int, most: int) -> tuple[str, int]:
    """Draw an expression of `least` to `most` symbols, and its value. ValueError if there is none in many attempts."""
    for _ in range(ATTEMPTS):
        symbols: list[str] = []
        value = _draw(rng, symbols, 1, most)
        if value is not None and least <= len(symbols) <= most:
            return "".join(symbols), value
    raise ValueError(f"lengths={least, most}: no expression in {ATTEMPTS} attempts")


def _draw(rng: Random, symbols: list[str], depth: int, most: int) -> int | None:
    """Append an expression to `symbols` and return its value, None if it has become too long."""
    operator = rng.choice("Mmds")
    symbols += ["[", operator]
    values = []
    for _ in range(rng.randint(2, ARGUMENTS)):
        if len(symbols) > most:
            return None
        if rng.random() < NESTED and depth < DEPTH:
            value = _draw(rng, symbols, depth + 1, most)
            if value is None:
                return None
        else:
            value = int(10 * rng.random())
            symbols.append(str(value))
        values.append(value)
    symbols.append("]")
    return OPERATORS[operator](values)
