"""Made sentences, acceptable or not: verbs agree with a noun that may be far away, and clauses are complete.

"the keys by the cup that the boy near the hats needs are old" is acceptable. In one that is not, a verb has the
wrong number, or a clause has no verb, or two. Nouns between a verb and its subject have a number of their own, and as
many sentences lack a verb as have one too many: words alone say little, their order says all.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ndlightnet.data.made.drawn_set import draw_once

VERSION = 1  # of the sentences; to be raised when a change gives others for the same arguments
CLASSES = ("acceptable", "not acceptable")
THINGS = ("key", "cup", "box", "pen", "hat", "map", "bag", "toy")
PEOPLE = ("boy", "girl", "king", "aunt")
NEAR = ("by", "near", "under", "behind")
ACTS = ("see", "like", "need", "find")
STATES = ("old", "new", "red", "lost", "big", "gone")


def make_sentences(folder: Path, train: int = 6000, test: int = 1000, seed: int = 0) -> Path:
    """Write train.tsv and test.tsv, columns sentence and label, half of each class up to a remainder, no sentence
    twice; return `folder`. The same arguments give the same sentences, and a set that exists is left as it is.
    DataError if the folder holds anything else; ValueError for fewer than one of either."""
    if min(train, test) < 1:
        raise ValueError(f"train={train}, test={test}: expected 1 or more")

    def draw(draft: Path) -> None:
        rng, seen = np.random.default_rng(seed), set[str]()
        for name, count in (("train", train), ("test", test)):
            with open(draft / f"{name}.tsv", "w", encoding="utf-8", newline="") as file:
                file.write("sentence\tlabel\n")
                for number in rng.permutation(count).tolist():
                    while (sentence := draw_sentence(rng, number % 2 == 0)) in seen:
                        pass
                    seen.add(sentence)
                    file.write(f"{sentence}\t{CLASSES[number % 2]}\n")

    record = {"version": VERSION, "train": train, "test": test, "seed": seed}
    return draw_once(folder, record, draw)


def draw_sentence(rng: np.random.Generator, acceptable: bool) -> str:
    """Draw a sentence, which has one fault unless it is `acceptable`."""
    plural, inner, clause = rng.random(3) < 0.5
    faults = ["verb", "inner verb", "missing", "double"] if clause else ["verb"]  # a clause alone says nothing
    fault = "" if acceptable else str(rng.choice(faults))
    words = _noun(rng, THINGS, plural) + _places(rng)
    if clause:
        act = _act(rng, inner != (fault == "inner verb"))
        acts = {"missing": [], "double": [act, _act(rng, inner)]}.get(fault, [act])
        words += ["that", *_noun(rng, PEOPLE, inner), *_places(rng), *acts]
    words += ["are" if plural != (fault == "verb") else "is", str(rng.choice(STATES))]
    return " ".join(words)


def _noun(rng: np.random.Generator, nouns: Sequence[str], plural: bool) -> list[str]:
    noun = str(rng.choice(nouns))
    ending = ("es" if noun.endswith("x") else "s") if plural else ""
    return ["the", noun + ending]


def _places(rng: np.random.Generator) -> list[str]:
    """Draw a place, such as "near the doors", or none."""
    return [str(rng.choice(NEAR)), *_noun(rng, THINGS, rng.random() < 0.5)] if rng.random() < 0.5 else []


def _act(rng: np.random.Generator, plural: bool) -> str:
    return str(rng.choice(ACTS)) + ("" if plural else "s")
