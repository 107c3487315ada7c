"""Tokenizers: those of others to the number, any text back to itself, every file that holds one, every refusal."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ndlightnet.data.errors import DataError
from ndlightnet.data.text.tokenizer import (
    BYTES,
    ByteTokenizer,
    SubwordTokenizer,
    load_tokenizer,
    parse_tokenizer,
    train_tokenizer,
)

from ..refusals import refuses

DATA = Path(os.environ.get("NDLIGHTNET_DATA", "nowhere"))
AWKWARD = [
    "",
    " ",
    "The quick  brown   fox's 3,141 jumps.\n\n\nOver\n \n\tthe lazy dog.  ",
    "it's I'LL we've don't 'tis \u2019s",
    "Stra\u00dfe na\u00efve caf\u00e9 cafe\u0301 \u0130stanbul \u1e9e",
    "数学と言語 한국어 العربية עברית ไทย",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea e\ufe0f",
    "\u00a0\u2003\u3000\u200b\ufeff\u0085\u2028 end",
    "a\x00b\x1cc\rd\r\ne\x7f\ufffd",
    "x" * 250 + " " + "9" * 30 + " !!??...--==##",
    "antidisestablishmentarianism pneumonoultramicroscopic " * 3 + "\n",
]
SPECIAL = ["<|endoftext|>", "[SEP] [MASK] [CLS]", "<|mask|>", "</s> <mask>", "a<|endoftext|><|endoftext|>\n", "[UNK]"]
TEXTS = ["the cat and the hat\n\nsat on the mat 123 \U0001f600\U0001f600 数学 数学 " * 4]


def stored(name):
    if not (DATA / name).exists():
        pytest.skip(f"not here: {DATA / name}")
    return DATA / name


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer(TEXTS, 285)


@pytest.fixture(scope="module")
def gpt2():
    return load_tokenizer(stored("gpt2_bpe"))


@pytest.fixture(scope="module")
def bert():
    return load_tokenizer(stored("bert_vocab/vocab.txt"))


# ------------------------------------------------------------------------------- those of others
@pytest.mark.slow
def test_gpt2_has_the_numbers_of_transformers(gpt2):
    transformers = pytest.importorskip("transformers")
    folder = stored("gpt2_bpe")
    theirs = transformers.GPT2Tokenizer(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    assert (gpt2.vocab_size, gpt2.end, gpt2.mask) == (50257, 50256, None)
    for text, ids in zip(AWKWARD, gpt2.encode(AWKWARD), strict=True):
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert gpt2.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False) == text
    for text, ids in zip(SPECIAL, gpt2.encode(SPECIAL), strict=True):
        assert ids == theirs.encode(text, add_special_tokens=False, split_special_tokens=True), text
        assert gpt2.end not in ids and gpt2.decode(ids) == text
    assert gpt2.decode([gpt2.end]) == "<|endoftext|>"


def test_gpt2_by_hand(gpt2):
    """The numbers that its authors print."""
    assert gpt2.encode(["Hello world", " Hello", "\n\n", "<|endoftext|>"]) == [
        [15496, 995],
        [18435],
        [628],
        [27, 91, 437, 1659, 5239, 91, 29],
    ]


@pytest.mark.slow
def test_word_pieces_are_those_of_bert(bert):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertTokenizerFast(str(stored("bert_vocab/vocab.txt")), do_lower_case=True)
    assert (bert.vocab_size, bert.end, bert.mask) == (len(theirs), theirs.sep_token_id, theirs.mask_token_id)
    for text, ids in zip(AWKWARD, bert.encode(AWKWARD), strict=True):
        assert ids == theirs.encode(text, add_special_tokens=False), text
    special = {bert.end, bert.mask, theirs.cls_token_id}
    assert not any(special & {*ids} for ids in bert.encode(SPECIAL))
    assert bert.decode(bert.encode(["Unaffable dogs' tails, it's!"])[0]) == "unaffable dogs ' tails, it ' s!"


def test_word_pieces_with_capitals_keep_them(tmp_path):
    words = ["[CLS]", "[UNK]", "[SEP]", "[MASK]", "the", "The", "##re", "é"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), "utf-8")
    assert load_tokenizer(tmp_path).encode(["There the é thex [SEP]"]) == [[5, 6, 4, 7, 1, 1, 1, 1]]
    (tmp_path / "vocab.txt").write_text("\n".join(word.replace("T", "t2") for word in words), "utf-8")
    assert load_tokenizer(tmp_path).encode(["There the é"]) == [[4, 6, 4, 1]]  # without the accent


# ------------------------------------------------------------------------------- trained, and bytes
@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60) | st.sampled_from(AWKWARD + SPECIAL))
def test_any_text_comes_back(bpe, text):
    for tokenizer in (bpe, ByteTokenizer()):
        ids = tokenizer.encode([text])[0]
        assert tokenizer.decode(ids) == "".join(tokenizer.decode_stream(ids)) == text
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        assert not {bpe.end, bpe.mask} & {*ids} or tokenizer is not bpe


def test_a_trained_vocabulary_joins_what_is_frequent(bpe):
    assert isinstance(bpe, SubwordTokenizer) and bpe.vocab_size == 285
    assert (bpe.end, bpe.mask) == (0, 1) and bpe.decode([0, 1]) == "<|endoftext|><|mask|>"
    assert len(bpe.encode([" the"])[0]) == 1 < len(bpe.encode([" eht"])[0])
    assert train_tokenizer(TEXTS, 258).vocab_size == 258
    assert len(train_tokenizer(["abc"], 10_000).encode(["abcd"])[0]) == 2  # of a text that has no more pairs
    refuses(lambda: train_tokenizer(TEXTS, 257), None, "^train=257: expected 258 tokens or more")


def test_bytes():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.end, tokenizer.mask) == (256, 0, None)
    assert tokenizer.encode(["aé", ""]) == [[97, 195, 169], []]
    assert tokenizer.decode([97, 195, 255, 169]) == "a\ufffd\ufffd\ufffd"


@pytest.mark.parametrize("name", ["bytes", "bpe", "gpt2"])
def test_a_stream_has_whole_characters(name, request):
    """Of characters of several tokens nothing is yielded before the last of them."""
    tokenizer = ByteTokenizer() if name == "bytes" else request.getfixturevalue(name)
    text = "a\U0001f9ff\u0e17數 e\u0301\U0001f468\u200d\U0001f469"
    ids = tokenizer.encode([text])[0]
    pieces = list(tokenizer.decode_stream(iter(ids)))
    assert "".join(pieces) == text and "" not in pieces and len(ids) > len(pieces) > 4
    assert not any("\ufffd" in piece for piece in pieces)
    cut = tokenizer.encode(["a\U0001f9ff"])[0][:-1]  # a character that does not end
    assert "".join(tokenizer.decode_stream(cut)) == tokenizer.decode(cut) != "a"


@pytest.mark.parametrize("name", ["bpe", "gpt2", "bert", "metaspace"])
def test_a_stream_after_a_prompt_keeps_the_space_between(name, request):
    if name == "metaspace":
        library = pytest.importorskip("tokenizers")
        model = library.SentencePieceBPETokenizer()
        model.train_from_iterator(TEXTS, 40, min_frequency=0, special_tokens=["<unk>", "</s>"], show_progress=False)
        tokenizer = SubwordTokenizer(model.to_str())
    else:
        tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(["the cat and the hat"])[0]
    for count in range(1, len(ids)):
        stream = tokenizer.decode_stream(ids[count:], ids[:count])
        assert tokenizer.decode(ids[:count]) + "".join(stream) == "the cat and the hat"


# ------------------------------------------------------------------------------- files
def test_digests_are_equal_where_the_numbers_are(bpe, tmp_path):
    again = parse_tokenizer(bpe.text, "a test")
    bpe.save(tmp_path / "a.json")
    assert bpe.digest == again.digest == load_tokenizer(tmp_path / "a.json").digest
    others = [ByteTokenizer().digest, train_tokenizer(["xyz" * 9], 300).digest, train_tokenizer(TEXTS, 284).digest]
    assert len({bpe.digest, *others}) == 4 and all(len(digest) == 16 for digest in others)
    assert load_tokenizer(BYTES).digest == parse_tokenizer(ByteTokenizer().text, "").digest == others[0]


def same(tokenizer, second):
    numbers = [(one.vocab_size, one.end, one.mask, one.digest) for one in (tokenizer, second)]
    assert numbers[0] == numbers[1] and tokenizer.encode(AWKWARD + SPECIAL) == second.encode(AWKWARD + SPECIAL)


def test_every_file_that_holds_one(bpe, tmp_path, monkeypatch):
    """Special tokens of a file are text in a text; what it cuts and pads is not cut and padded."""
    bpe.save(tmp_path / "new" / "tokenizer.json")
    torch.save({"tokenizer": bpe.text, "state_dict": {}}, tmp_path / "last.ckpt")
    for source in ("new", "new/tokenizer.json", "last.ckpt"):
        same(load_tokenizer(tmp_path / source), bpe)
        same(load_tokenizer(str(tmp_path / source)), bpe)
    monkeypatch.setenv("NDLIGHTNET_DATA", str(tmp_path))
    same(load_tokenizer("new"), bpe)
    ByteTokenizer().save(tmp_path / "bytes" / "tokenizer.json")
    torch.save({"tokenizer": ByteTokenizer().text}, tmp_path / "bytes.ckpt")
    for source in ("bytes", tmp_path / "bytes", tmp_path / "bytes.ckpt"):
        assert isinstance(load_tokenizer(source), ByteTokenizer)
    library = pytest.importorskip("tokenizers")
    cutting = library.Tokenizer.from_str(bpe.text)
    cutting.enable_truncation(3)
    cutting.enable_padding(length=99)
    cutting.save(str(tmp_path / "cutting.json"))
    same(load_tokenizer(tmp_path / "cutting.json"), bpe)


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_a_folder_of_gpt2s_two_files(tmp_path, names):
    words = [*"abcd", "Ġ", "ab", "<|endoftext|>"]
    (tmp_path / names[0]).write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (tmp_path / names[1]).write_text("#version: 0.2\na b\n")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(["abc ab"]) == [[5, 2, 4, 5]] and (tokenizer.end, tokenizer.vocab_size) == (6, 7)
    same(parse_tokenizer(tokenizer.text, "a test"), tokenizer)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("gone.json", None, "^tokenizer=SOURCE: no such tokenizer, expected 'bytes', a tokenizer.json"),
        ("empty", {}, "^tokenizer=SOURCE: no such tokenizer"),
        ("half", {"vocab.json": "{}"}, "^tokenizer=SOURCE: no such tokenizer"),
        ("broken", {"vocab.json": "{", "merges.txt": ""}, "^SOURCE: not a tokenizer "),
        ("endless", {"vocab.json": '{"a": 0}', "merges.txt": ""}, r"^SOURCE: not a tokenizer \(has no token that ends"),
        ("a.json", "{}", "^SOURCE: not a tokenizer "),
        ("a.json", b"\xff\x00", "^SOURCE: not a tokenizer "),
        ("a.json", "5", "^SOURCE: not a tokenizer "),
        ("vocab.txt", "a\nb\n[UNK]", r"^SOURCE: not a tokenizer \(sep_token not found in the vocabulary\), expected"),
        ("vocab.txt", "", "^SOURCE: not a tokenizer "),
        ("vocab.txt", "[CLS]\n[SEP]", r"^SOURCE: not a tokenizer \(has no \[UNK\]\)"),
        ("a.ckpt", b"?", "^SOURCE: not a tokenizer .*a checkpoint of a training on text$"),
    ],
)
def test_what_is_no_tokenizer_is_one_line(tmp_path, name, content, message):
    source = tmp_path / name
    if isinstance(content, dict):
        source.mkdir()
        for file, text in content.items():
            (source / file).write_text(text)
    elif content is not None:
        source.write_bytes(content if isinstance(content, bytes) else content.encode())
    line = refuses(lambda: load_tokenizer(source), None, message.replace("SOURCE", str(source)))
    assert "\n" not in line


def test_a_checkpoint_without_a_tokenizer(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "a.ckpt")
    refuses(lambda: load_tokenizer(tmp_path / "a.ckpt"), tmp_path / "a.ckpt", "a checkpoint without one")
    torch.save({"tokenizer": "{}"}, tmp_path / "b.ckpt")
    refuses(lambda: load_tokenizer(tmp_path / "b.ckpt"), tmp_path / "b.ckpt", "not a tokenizer")
    with pytest.raises(DataError, match=r"^x: not a tokenizer "):
        parse_tokenizer("{}", "x")
