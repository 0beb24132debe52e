"""Pages of the site that lie outside docs/, and links to them (a hook of mkdocs, see mkdocs.yml).

On the disk and on a code host a page links to `../examples/custom_verifier.py`. On the site that file is a page of its
own, so the link must lead there. A link to any other file outside docs/ stays as it is, and a strict build refuses it.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PLACES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/peers/README.md": "benchmarks/peers.md",
    **{f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted((ROOT / "examples").glob("*.py"))},
}
"""Files of the repository, and what each is called on the site."""


def on_files(files: Any, config: Any) -> Any:
    for source, place in PLACES.items():
        files.append(File.generated(config, place, content=as_page(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    place = page.file.src_uri
    source = next((s for s, p in PLACES.items() if p == place), f"docs/{place}")
    return with_links(markdown, source, place)


def as_page(source: str) -> str:
    """The text of a file as Markdown; a program becomes a page with its source."""
    text = (ROOT / source).read_text(encoding="utf-8")
    return text if source.endswith(".md") else f"# {source}\n\n```python\n{text}```\n"


def with_links(markdown: str, source: str, place: str) -> str:
    """Links that are relative to `source` in the repository, made relative to `place` on the site.

    with_links("[it](../README.md#limits)", "docs/api.md", "api.md")  →  "[it](index.md#limits)"
    """

    def moved(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if found in PLACES:
            found = PLACES[found]
        elif found.startswith("docs/"):
            found = found.removeprefix("docs/")
        else:
            return link[0]
        return f"]({posixpath.relpath(found, posixpath.dirname(place) or '.')}{anchor})"

    return re.sub(r"\]\((?![a-z]+:)([^()#\s]+)(#[^()\s]*)?\)", moved, markdown)
