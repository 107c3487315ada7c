"""The model card of a saved network: the README.md that the Hub shows and searches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

TAGS = ("ndlightnet", "lightnet-attention", "pytorch", "arxiv:2405.21022")
NAME = r"[\w.-]+(/[\w.-]+)?"  # of a data set on the Hub
TEXT = """---
{header}
---

# {title}

A network of ndlightnet (`{network}`), with LightNet attention ([arXiv 2405.21022](https://arxiv.org/abs/2405.21022));
config.json has its arguments.

```python
from ndlightnet.models import {network}

model = {network}.from_pretrained("{source}")
```

## Training data

{data}

## Results

{results}

## Licence

{license}
"""


def model_card(
    network: str, repo_id: str | None, card_data: Any, data: Sequence[str], metrics: Mapping[str, float], **header: Any
) -> str:
    """Return the card of a network of this class in Markdown. card_data: the class ModelCardData of huggingface_hub;
    header: license, tags and pipeline_tag; these and the other arguments are those of `save_pretrained`."""
    tags = [*TAGS, *(tag for tag in header.pop("tags") if tag not in TAGS)]
    names = [name for name in data if re.fullmatch(NAME, name)]
    card = card_data(
        library_name="ndlightnet", tags=tags, datasets=names or None, metrics=list(metrics) or None, **header
    )
    rows = ["| metric | value |", "|---|---|", *(f"| {key} | {value:g} |" for key, value in metrics.items())]
    return TEXT.format(
        header=card.to_yaml(),
        title=(repo_id or network).split("/")[-1],
        network=network,
        source=repo_id or "FOLDER",
        data=", ".join(data) or "Not stated.",
        results="\n".join(rows) if metrics else "Not stated.",
        license=header["license"] or "Not stated.",
    )
