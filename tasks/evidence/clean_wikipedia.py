"""The articles of a Wikipedia dump as plain text, a line of JSON each: {"text": title and article}.

python tasks/evidence/clean_wikipedia.py text/enwik8.xz enwik8.jsonl.xz

Templates, tables, references, formulas, pictures, comments and links to other languages are left out; of links and
headings the words stay. Pages of other namespaces and redirects are not articles.
"""

import json
import lzma
import re
import sys
from html import unescape
from pathlib import Path

PAGE = re.compile(r"<title>([^<:]*)</title>.*?<text[^>]*>(.*?)</text>", re.DOTALL)
INNERMOST = re.compile(r"\{\{[^{}]*\}\}|\{\|[^{}]*?\|\}|\[\[(?:Image|File|Category|[a-z-]{2,12}):[^\[\]]*\]\]", re.I)
RULES = [
    (re.compile(r"<!--.*?-->|<(ref|math|table|gallery|pre|code|timeline|nowiki)\b[^>]*?(/>|>.*?</\1>)", re.DOTALL), ""),
    (re.compile(r"\[\[[^\[\]|]*\|([^\[\]]*)\]\]|\[\[([^\[\]]*)\]\]"), r"\1\2"),  # [[page|words]], [[page]]
    (re.compile(r"\[https?://[^\s\]]*\s*([^\]]*)\]"), r"\1"),
    (re.compile(r"'{2,}|<[^<>]*>|__[A-Z]+__"), ""),
    (re.compile(r"^=+\s*(.*?)\s*=+\s*$", re.MULTILINE), r"\1"),
    (re.compile(r"^[*#:;]+\s*|^\s*[|!{].*$|[ \t]+$", re.MULTILINE), ""),
    (re.compile(r"\n{3,}"), "\n\n"),
]


def cleaned(article: str) -> str:
    """Return an article without its markup."""
    article = unescape(unescape(article))
    article = RULES[0][0].sub("", article)
    while (shorter := INNERMOST.sub("", article)) != article:  # they are nested
        article = shorter
    for pattern, words in RULES[1:]:
        article = pattern.sub(words, article)
    return article.strip()


def main(source: str, target: str) -> None:
    dump = lzma.decompress(Path(source).read_bytes()).decode(errors="ignore")
    articles = (
        (unescape(title), text) for title, text in PAGE.findall(dump) if not text.lower().startswith("#redirect")
    )
    texts = [f"{title}\n\n{body}" for title, article in articles if len(body := cleaned(article)) > 200]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
    Path(target).write_bytes(lzma.compress(lines) if target.endswith(".xz") else lines)
    print(f"{target}: {len(texts)} articles, {sum(map(len, (text.encode() for text in texts))):,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
