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
    network: str,
    repo_id: str | None,
    card_data: Any,
    data: Sequence[str],
    metrics: Mapping[str, float],
    *,
    license: str | None,
    tags: Sequence[str],
    pipeline_tag: str | None,
) -> str:
    """Return the card of a network of this class in Markdown. card_data: the class ModelCardData of huggingface_hub;
    the other arguments are those of `save_pretrained`."""
    header = card_data(
        library_name="ndlightnet",
        tags=[*TAGS, *(tag for tag in tags if tag not in TAGS)],
        license=license,
        pipeline_tag=pipeline_tag,
        datasets=[name for name in data if re.fullmatch(NAME, name)] or None,
        metrics=list(metrics) or None,
    )
    rows = ["| metric | value |", "|---|---|", *(f"| {key} | {value:g} |" for key, value in metrics.items())]
    return TEXT.format(
        header=header.to_yaml(),
        title=(repo_id or network).split("/")[-1],
        network=network,
        source=repo_id or "FOLDER",
        data=", ".join(data) or "Not stated.",
        results="\n".join(rows) if metrics else "Not stated.",
        license=license or "Not stated.",
    )
