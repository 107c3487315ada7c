"""Made notes: one sentence is news, the same arguments give the same notes, and every word is a token."""

import re

import numpy as np
import pytest

from ndlightnet.data.errors import DataError
from ndlightnet.data.made.notes import DAYS, OTHERS, VOCABULARY, draw_note, make_notes
from ndlightnet.data.text.tables import read_pairs
from ndlightnet.data.text.tokenizer import load_tokenizer

SENTENCE = re.compile(r"On (\w+) a (\w+ \w+) was (\w+) (\w+ the \w+)\.")


def test_one_sentence_is_news():
    rng, places = np.random.default_rng(0), []
    for _ in range(400):
        document, summary = draw_note(rng, 4)
        sentences = SENTENCE.findall(document)
        news = [number for number, one in enumerate(sentences) if one[2] == "found"]
        assert len(sentences) == 4 and len(news) == 1
        assert {one[0] for one in sentences} <= {*DAYS} and {one[2] for one in sentences} <= {"found", *OTHERS}
        _, thing, _, where = sentences[news[0]]
        assert summary == f"{thing} found {where}"
        places += news
    counts = np.bincount(places, minlength=4)
    assert (abs(counts - 100) < 4 * np.sqrt(400 * 0.25 * 0.75)).all()  # four standard deviations


def test_sets_are_made_once(tmp_path):
    sets = [make_notes(tmp_path / str(number), 50, 10, 2) for number in range(2)]
    assert make_notes(sets[0], 50, 10, 2) == sets[0]
    for name in ("train.jsonl", "test.jsonl", "tokenizer.json"):
        assert (sets[0] / name).read_bytes() == (sets[1] / name).read_bytes()
    train, test = (read_pairs(sets[0] / f"{name}.jsonl", "document", "summary") for name in ("train", "test"))
    assert (len(train), len(test)) == (50, 10) and len({row.source for row in train + test}) == 60
    with pytest.raises(DataError, match="drawn with other arguments"):
        make_notes(sets[0], 50, 10, 3)
    with pytest.raises(ValueError, match="train=0, test=10, sentences=4: expected 1 or more"):
        make_notes(tmp_path / "none", 0, 10)
    with pytest.raises(ValueError, match="train=13000, test=500: expected 13440 notes of one sentence at most"):
        make_notes(tmp_path / "none", 13000, 500, 1)


@pytest.mark.slow
def test_every_word_is_a_token(tmp_path):
    folder = make_notes(tmp_path / "notes")
    tokenizer = load_tokenizer(folder)
    assert 256 < tokenizer.vocab_size <= VOCABULARY
    for row in read_pairs(folder / "test.jsonl", "document", "summary"):
        for text in (row.source, row.targets[0]):
            words = re.findall(r"\w+|\.", text)
            assert len(tokenizer.encode([text])[0]) <= len(words) + 1  # a first word without its space may be two
