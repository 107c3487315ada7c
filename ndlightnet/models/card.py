"""The model card of a saved network: the README.md that the Hub shows and searches."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

TAGS = ("ndlightnet", "lightnet-attention", "pytorch", "arxiv:2405.21022")
NAME = r"[\w.-]+(/[\w.-]+)?"  # of a data set on the Hub


@dataclass(frozen=True)
class Card:
    """What a model card says; the arguments are those of `save_pretrained`."""

    network: str
    license: str | None
    data: list[str]
    metrics: dict[str, float]
    tags: Sequence[str]
    pipeline_tag: str | None
    repo_id: str | None

    @property
    def says_more(self) -> bool:
        """Whether more is known than the network."""
        return bool(self.license or self.data or self.metrics or self.tags or self.repo_id)

    def text(self) -> str:
        """Return the card in Markdown, with its data in YAML in front."""
        entries = {
            "library_name": "ndlightnet",
            "tags": [*TAGS, *(tag for tag in self.tags if tag not in TAGS)],
            "license": self.license,
            "pipeline_tag": self.pipeline_tag,
            "datasets": [name for name in self.data if re.fullmatch(NAME, name)],
            "metrics": list(self.metrics),
        }
        # JSON is YAML, with texts in quotes
        head = [f"{key}: {json.dumps(value)}" for key, value in entries.items() if value]
        name = (self.repo_id or self.network).split("/")[-1]
        where = self.repo_id or "FOLDER"
        lines = [
            "---",
            *head,
            "---",
            "",
            f"# {name}",
            "",
            f"A network of ndlightnet (`{self.network}`), with LightNet attention "
            "([arXiv 2405.21022](https://arxiv.org/abs/2405.21022)); config.json has its "
            "arguments.",
            "",
            "```python",
            f"from ndlightnet.models import {self.network}",
            "",
            f'model = {self.network}.from_pretrained("{where}")',
            "```",
            "",
            "## Training data",
            "",
            ", ".join(self.data) or "Not stated.",
            "",
            "## Results",
            "",
        ]
        if self.metrics:
            rows = [f"| {key} | {value:g} |" for key, value in self.metrics.items()]
            lines += ["| metric | value |", "|---|---|", *rows]
        else:
            lines += ["Not stated."]
        lines += ["", "## Licence", "", self.license or "Not stated.", ""]
        return "\n".join(lines)
