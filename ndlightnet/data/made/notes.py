"""Made notes of which one sentence is news: "On Monday a red key was found near the mill." and others like it.

Every sentence of a note says what became of which thing, where; in one of them it was found, and the summary is "red
key found near the mill". All words of the others are possible in it: which of them belong to "found" says the order.
"""

import json
import math
from pathlib import Path

import numpy as np

from ndlightnet.data.made.drawn_set import draw_once
from ndlightnet.data.text.tokenizer import FILE, train_tokenizer

VERSION = 1  # of the notes; to be raised when a change gives others for the same arguments
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
COLOURS = ("red", "green", "blue", "white", "black", "yellow", "brown", "grey")
THINGS = ("key", "cup", "box", "pen", "hat", "map", "bag", "coat", "clock", "lamp", "book", "ring")
PLACES = ("mill", "barn", "school", "station", "harbour", "bridge", "market", "church", "tower", "garden")
WHERE = ("near", "behind", "under", "inside")
NEWS, OTHERS = "found", ("seen", "sold", "painted", "mended", "lost")
VOCABULARY = 600  # most tokens: every word is one


def make_notes(folder: Path, train: int = 6000, test: int = 500, sentences: int = 4, seed: int = 0) -> Path:
    """Write train.jsonl and test.jsonl, fields document and summary, no document twice, and the tokenizer of both;
    return `folder`. The same arguments give the same notes, and a set that exists is left as it is.
    DataError if the folder holds anything else; ValueError for fewer than one of either or of sentences, and for more
    than half of all notes that there are."""
    if min(train, test, sentences) < 1:
        raise ValueError(f"train={train}, test={test}, sentences={sentences}: expected 1 or more")
    most = math.prod(map(len, (DAYS, COLOURS, THINGS, WHERE, PLACES))) // 2  # of one sentence
    if sentences == 1 and train + test > most:
        raise ValueError(
            f"train={train}, test={test}: expected {most} notes of one sentence at most, or more sentences"
        )

    def draw(draft: Path) -> None:
        rng, notes = np.random.default_rng(seed), dict[str, str]()
        while len(notes) < train + test:
            document, summary = draw_note(rng, sentences)
            notes[document] = summary
        rows = [{"document": document, "summary": summary} for document, summary in notes.items()]
        for name, part in (("train", rows[:train]), ("test", rows[train:])):
            lines = [json.dumps(row) + "\n" for row in part]
            (draft / f"{name}.jsonl").write_text("".join(lines), "utf-8")
        texts = [text for row in rows[:train] for text in row.values()]
        train_tokenizer(texts, VOCABULARY).save(draft / FILE)

    record = {"version": VERSION, "train": train, "test": test, "sentences": sentences, "seed": seed}
    return draw_once(folder, record, draw)


def draw_note(rng: np.random.Generator, sentences: int) -> tuple[str, str]:
    """Draw a note of so many sentences, one of which is news, and its summary."""
    lines, news, summary = [], int(rng.integers(sentences)), ""
    for number in range(sentences):
        day, colour, thing, where, place = (str(rng.choice(words)) for words in (DAYS, COLOURS, THINGS, WHERE, PLACES))
        became = NEWS if number == news else str(rng.choice(OTHERS))
        lines.append(f"On {day} a {colour} {thing} was {became} {where} the {place}.")
        if number == news:
            summary = f"{colour} {thing} {became} {where} the {place}"
    return " ".join(lines), summary
