"""The page of a run, parsed as a browser would."""

import math
import os
from html.parser import HTMLParser
from urllib.parse import unquote

from ndlightnet.training.segmentation.case_page import write_page
from ndlightnet.training.segmentation.metrics import MEASURES, interval

NAMES = ["background", "liver <left>", "tumour & co"]
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Texts of elements by tag, the cells of each table, the attributes of each image."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.tables: list[list[list[str]]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in self.open:
            self.texts[tag][-1] += data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def row_of(*dice: float, volume: float = 1.5, **others: float) -> list[dict[str, float]]:
    rest = {"hd95_mm": 2.25, "nsd": 0.5, "volume_ml": volume, "truth_ml": 4.0} | others
    return [{"dice": d, **rest} for d in dice]


def page_of(path, *arguments, **options) -> Page:
    write_page(path, *arguments, **options)
    return Page(path.read_text(encoding="utf-8"))


def test_cases_come_worst_first_with_their_classes_and_pictures(tmp_path):
    nan = math.nan
    rows = {
        "good": row_of(0.9, 1.0),
        "none": row_of(nan, nan, volume=0.0, truth_ml=0.0),
        "a b#1?": row_of(0.25, nan),
        "middle": row_of(0.5, 0.75),
    }
    for name in ("good", "a b#1?"):
        (tmp_path / f"{name}.png").write_bytes(b"")
    page = page_of(tmp_path / "index.html", rows, NAMES, "T <1>", "sum & all", ["/f: a < b"])
    assert page.texts["title"] == page.texts["h1"] == ["T <1>"]
    assert page.texts["p"][:2] == ["sum & all", "4 cases, 1 failure"] and page.texts["li"] == ["/f: a < b"]
    order = {"a b#1?": "0.250", "middle": "0.625", "good": "0.950", "none": "-"}
    assert page.texts["h2"] == [f"{name} mean Dice {dice}" for name, dice in order.items()]
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert [unquote(image["src"]) for image in images] == ["a b#1?.png", "good.png"]
    assert all(image["loading"] == "lazy" and image["alt"] for image in images)
    assert len(page.tables) == 4  # the classes, and three cases with a class
    assert page.tables[1] == [
        ["class", "Dice", "HD95 (mm)", "surface Dice", "volume (ml)", "truth (ml)"],
        ["liver <left>", "0.250", "2.2", "0.500", "1.50", "4.00"],
        ["tumour & co", "-", "2.2", "0.500", "1.50", "4.00"],
    ]
    assert "no class" in page.texts["p"]


def test_classes_are_summed_up_over_the_cases(tmp_path):
    nan = math.nan
    rows = {
        "a": row_of(0.5, nan, hd95_mm=1.0),
        "b": row_of(0.75, nan, hd95_mm=nan),
        "c": row_of(1.0, 0.25, hd95_mm=4.0),
        "d": row_of(0.25, nan, hd95_mm=9.0),
    }
    page = page_of(tmp_path / "index.html", rows, NAMES, "t", "s")
    low, high = interval([[0.5, 0.75, 1.0, 0.25]])
    assert page.tables[0] == [
        ["class", "cases", "mean Dice", "SD", "95 % interval", "median HD95 (mm)", "mean surface Dice"],
        ["liver <left>", "4", "0.625", "0.280", f"{low:.3f} to {high:.3f}", "4.0", "0.500"],
        ["tumour & co", "1", "0.250", "0.000", "-", "4.0", "0.500"],
    ]


def test_predictions_come_by_name_with_volumes(tmp_path):
    unknown = dict.fromkeys(MEASURES, math.nan)
    rows = {"b": [unknown | {"volume_ml": ml} for ml in (0.125, 0.0)], "a": []}
    rows["a"] = [unknown | {"volume_ml": ml} for ml in (1000.0, 2.0)]
    page = page_of(tmp_path / "index.html", rows, NAMES, "t", "s")
    assert page.texts["h2"] == ["a", "b"]
    assert page.tables == [
        [["class", "volume (ml)"], ["liver <left>", "1000.00"], ["tumour & co", "2.00"]],
        [["class", "volume (ml)"], ["liver <left>", "0.12"]],
    ]


def test_long_tables_are_folded(tmp_path):
    names = ["background", *(f"c{n}" for n in range(9))]
    rows = {"long": row_of(*[0.5] * 9), "short": row_of(*[1.0] * 9, volume=0.0, truth_ml=0.0)}
    rows["short"][0]["truth_ml"] = 1.0
    page = page_of(tmp_path / "index.html", rows, names, "t", "s")
    assert [attrs for tag, attrs in page.tags if tag == "details"] == [{}, {"open": None}]
    assert page.texts["summary"] == ["9 classes", "1 class"]


def test_a_run_without_cases_says_so(tmp_path):
    for failures in ([], ["/x: gone", "/y: gone"]):
        page = page_of(tmp_path / "new" / "i.html", {}, NAMES, "t", "s", failures=failures)
        assert page.texts["p"][1] == f"0 cases, {len(failures)} failures"
        assert page.texts.get("li", []) == failures
    assert os.listdir(tmp_path / "new") == ["i.html"]
