"""Made sentences: half are acceptable, the same arguments give the same ones, and words alone say nothing."""

import re

import numpy as np
import pytest

from ndlightnet.data.errors import DataError
from ndlightnet.data.made.sentences import ACTS, CLASSES, draw_sentence, make_sentences
from ndlightnet.data.text.tables import read_table


def faults(sentence: str) -> int:
    """Number of verbs that are wrong, missing or too many, from the words alone."""
    main = sentence.split(" that ")
    plural = main[0].split()[1].endswith("s")
    wrong = (re.search(r" (is|are) \w+$", sentence)[1] == "are") != plural
    if len(main) == 1:
        return int(wrong)
    words = main[1].split()[:-2]
    acts = [word for word in words if word.removesuffix("s") in ACTS]
    agree = all(act.endswith("s") != words[1].endswith("s") for act in acts)
    return wrong + (len(acts) != 1) + (not agree)


def test_sentences_have_one_fault_or_none():
    rng = np.random.default_rng(0)
    for acceptable in (True, False):
        drawn = [draw_sentence(rng, acceptable) for _ in range(300)]
        assert {faults(sentence) for sentence in drawn} == {int(not acceptable)}
        assert 0.4 < np.mean(["that" in sentence for sentence in drawn]) < 0.6


def test_sets_are_made_once(tmp_path):
    sets = [make_sentences(tmp_path / str(number), 301, 50) for number in range(2)]
    assert make_sentences(sets[0], 301, 50) == sets[0]
    files = [
        [read_table(folder / f"{name}.tsv", ["sentence"], "label") for name in ("train", "test")] for folder in sets
    ]
    assert files[0] == files[1]
    train, test = files[0]
    assert (len(train), len(test)) == (301, 50)
    assert len({row.texts for row in train + test}) == 351
    counts = [[[row.label for row in rows].count(label) for label in CLASSES] for rows in (train, test)]
    assert counts == [[151, 150], [25, 25]]
    with pytest.raises(DataError, match="drawn with other arguments"):
        make_sentences(sets[0], 300, 50)
    with pytest.raises(ValueError, match="train=0"):
        make_sentences(tmp_path / "none", 0)


def test_words_alone_do_not_tell():
    """Nor is a sentence longer if it is not acceptable."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    labels = np.arange(2000) % 2
    drawn = [draw_sentence(rng, label == 0) for label in labels]
    counts = CountVectorizer().fit_transform(drawn)
    model = LogisticRegression(max_iter=200).fit(counts[:1500], labels[:1500])
    assert model.score(counts[1500:], labels[1500:]) < 0.58
    lengths = [np.mean([len(s) for s, x in zip(drawn, labels, strict=True) if x == y]) for y in (0, 1)]
    assert abs(lengths[0] - lengths[1]) < 2
