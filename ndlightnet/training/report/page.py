"""HTML pages of a run's results, in one style."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment

from ndlightnet.data.errors import atomic_write

BASE = """
{%- macro table(heads, lines) %}
<table>
<tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for line in lines %}
<tr>{% for cell in line %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{%- endmacro -%}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --line: #d0d0d0; --soft: #666 }
@media (prefers-color-scheme: dark) { :root { --line: #444; --soft: #aaa } }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 90rem; margin: 2rem auto; padding: 0 1rem }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .5rem; overflow-wrap: anywhere }
.soft { color: var(--soft); font-weight: normal }
table { border-collapse: collapse; margin: .5rem 0 1rem }
th, td { padding: .15rem .8rem; border-bottom: 1px solid var(--line); text-align: right }
th:first-child, td:first-child { text-align: left }
td { font-variant-numeric: tabular-nums }
img { max-width: 100%; height: auto; border-radius: 6px }
li { overflow-wrap: anywhere }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ summary }}</p>
{% block failed %}
{% if failures %}
<p>{{ failures | length | counted("failure") }}</p>
{% endif %}
{% endblock %}
{% if failures %}
<ul>
{% for line in failures %}
<li>{{ line }}</li>
{% endfor %}
</ul>
{% endif %}
{% block content %}{% endblock %}
</body>
</html>
"""


def write_html(path: Path, template: str, **values: Any) -> None:
    """Write a page whose `template` extends "base": its blocks may call `table(heads, lines)` and
    the filter `counted`. values: title, summary, failures, and what the template needs."""
    pages = DictLoader({"base": BASE.lstrip(), "page": template.lstrip()})
    environment = Environment(loader=pages, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["counted"] = _counted
    page = environment.get_template("page").render(**values)
    with atomic_write(path) as draft:
        draft.write_text(page + "\n", encoding="utf-8", errors="backslashreplace")


def number(value: float | None, digits: int = 3) -> str:
    """Return a number for a page; "-" if it is not known."""
    return "-" if value is None or value != value else f"{value:.{digits}f}"


def _counted(n: int, what: str) -> str:
    plural = what + ("es" if what.endswith("s") else "s")
    return f"{n} {what if n == 1 else plural}"
