"""The page on the papers: what it names exists, and its networks have the parameters that it gives."""

import ast
import inspect
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from ndlightnet import models, nn, ops
from ndlightnet.__main__ import DOORS
from ndlightnet.models import NDLightDiT, NDLightNet, Seq2Seq
from ndlightnet.nn import mixers

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "ndlightnet" / "PAPERS.md"
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines() if line[:1] == "|"]
PAIR = re.compile(r"(?:[\d.]+|-)/(\d+\.\d\d)")  # printed/ours

published = mixers.published_mixer
softmax = "SoftmaxAttention"


def unplaced(heads):
    return partial(mixers.LightNetAttention, heads=heads, local=None, key_scale=1.0, lrpe=None)


def images(width, **options):
    options = {"mixer": published} | options
    return partial(NDLightNet, 2, num_classes=1000, patch_size=16, embed_dim=width, depth=12, **options)


def text(vocab, width, depth, mixer=published, **options):
    return partial(NDLightNet, 1, vocab_size=vocab, causal=True, embed_dim=width, depth=depth, mixer=mixer, **options)


def diffusion(size, **options):
    options = {"mixer": published} | options
    return partial(NDLightDiT, 2, in_chans=4, num_classes=1000, size=size, condition="tokens", **options)


def deit(size):
    return partial(pytest.importorskip("timm").create_model, f"deit_{size}_patch16_224")


wikitext, pile, books = partial(text, 50265, 512, 6), partial(text, 50272, 1024, 26), partial(text, 50257, 768, 12)
widths, local = (192, 384, 768), {"WindowAttention": {"window": 16}}
# by a row's first cell: functions that make its networks, in the order of its counts
NETWORKS = {
    "Tables 1 and 12: LightNet-T, -S, -B": lambda: [
        partial(size, 2, num_classes=1000, patch_size=16)
        for size in (models.ndlightnet_tiny, models.ndlightnet_small, models.ndlightnet_base)
    ],
    "without TPE": lambda: [images(width, tpe=False) for width in widths],
    "without LRPE": lambda: [images(width, mixer=unplaced(width // 64)) for width in widths],
    "DeiT": lambda: [deit(size) for size in ("tiny", "small", "base")],
    "HGRN": lambda: [images(width, mixer="HGRN") for width in widths[:2]],
    "Vim; nearest:": lambda: [images(width, mixer={"Mamba": {"scan": "axes"}}) for width in widths[:2]],
    "V-RWKV; nearest:": lambda: [images(width, mixer={"RWKV4": {"scan": "both"}}) for width in widths],
    "Table 2: LightNet-XL/2; FID, sFID, IS": lambda: [diffusion("XL")],
    "Table 3: LightNet": lambda: [wikitext()],
    "Transformer; 1+elu; Performer; cosFormer": lambda: [
        wikitext(mixer) for mixer in (softmax, "LinearAttention", "RandomFeatureAttention", "CosformerAttention")
    ],
    "S4; RWKV-4; HGRN": lambda: [wikitext(mixer) for mixer in ("S4", "RWKV4", "HGRN")],
    "Table 4: LightNet; without TPE; without LRPE": lambda: [pile(), pile(tpe=False), pile(unplaced(16))],
    "no share": lambda: [pile("UnsharedLightNet")],
    "LLaMA; TNL; Mamba": lambda: [pile(mixer) for mixer in (softmax, "TNL", "Mamba")],
    "Table 6: LightNet-B/2; without TPE; without LRPE": lambda: [
        diffusion("B"),
        diffusion("B", tpe=False),
        diffusion("B", mixer=unplaced(12)),
    ],
    "Tables 7 and 10": lambda: [
        text(50272, width, depth, "text_mixer") for width, depth in ((768, 15), (1024, 26), (2048, 18), (2560, 36))
    ],
    "Tables 8 and 11, Fig. 3: S, B, L, XL": lambda: [diffusion(size) for size in models.DIT_SIZES],
    "Table 2, PG-19 (any texts): vanilla or FlashAttention; local; LAVO": lambda: [
        books(mixer, tpe=False) for mixer in (softmax, local, {"LAVO": {"window": 16}})
    ],
    "LongShort": lambda: [books("LongShortAttention", tpe=False)],
    "S4D; ABC": lambda: [books(mixer, tpe=False) for mixer in ("S4", "ABCAttention")],
    "Tables 4 and 6, summaries, in the encoder: vanilla; S4D; ABC; local; LAVO; cosFormer; Performer; LongShort; "
    "Nyströmformer": lambda: [
        partial(Seq2Seq, 50257, mixer=mixer, decoder_mixer=softmax, cross=softmax)
        for mixer in (
            softmax,
            "S4",
            "ABCAttention",
            local,
            "LAVO",
            "CosformerAttention",
            "RandomFeatureAttention",
            "LongShortAttention",
            "NystromAttention",
        )
    ],
}


def exists(name):
    """A config, a command of `tasks/` with its subcommand, or a class or function of the library with its arguments."""
    if name in {path.stem for path in (ROOT / "configs").rglob("*.yaml")}:
        return True
    if command := re.fullmatch(r"(\w+)\.py ?(\w*)", name):
        stem, word = command.groups()
        if stem in DOORS:
            return not word or word in {*DOORS[stem].commands, *DOORS[stem].trainings}
        file = ROOT / "tasks" / "evidence" / f"{stem}.py"
        return file.exists() and (not word or f'"{word}"' in file.read_text())
    call = ast.parse(name, mode="eval").body
    function, options = (call.func, call.keywords) if isinstance(call, ast.Call) else (call, [])
    named = [getattr(room, function.id) for room in (mixers, ops, models, nn) if hasattr(room, function.id)]
    return bool(named) and {option.arg for option in options} <= {*inspect.signature(named[0]).parameters}


def test_what_the_page_names_exists():
    names = {name for row in ROWS for name in re.findall(r"`(.+?)`", " ".join(row))}
    assert len(names) > 60
    assert {name for name in names if not exists(name)} == set()


def test_each_document_has_a_row_of_each_of_its_numbers():
    """LightNet: 14 equations, 12 tables, 3 figures; LAVO: 11, 11 and 4; the notes on DeltaNet: 21 equations."""
    counts = []
    for section in PAGE.read_text().split("\n## ")[1:]:
        rows = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| "))
        seen: dict[str, set[int]] = {"Eq": set(), "Table": set(), "Fig": set()}
        for kind, numbers in re.findall(r"\b(Eq|Table|Fig)s?\.? (\d+(?:(?:, | to | and )\d+)*)", rows):
            for first, last in re.findall(r"(\d+)(?: to (\d+))?", numbers):
                seen[kind] |= {*range(int(first), int(last or first) + 1)}
        assert all(numbers == {*range(1, len(numbers) + 1)} for numbers in seen.values()), seen
        counts.append([len(numbers) for numbers in seen.values()])
    assert counts == [[14, 12, 3], [11, 11, 4], [0, 0, 0], [21, 0, 0]]


def test_every_count_has_its_network():
    assert sorted(row[0] for row in ROWS if PAIR.search(row[2])) == sorted(NETWORKS)


@pytest.mark.parametrize("first", NETWORKS)
def test_the_counts_are_those_of_the_networks(first):
    (row,) = (row for row in ROWS if row[0] == first)
    with torch.device("meta"):
        networks = [make() for make in NETWORKS[first]()]
    counts = [f"{sum(p.numel() for p in net.parameters()) / 1e6:.2f}" for net in networks]
    assert PAIR.findall(row[2]) == counts
