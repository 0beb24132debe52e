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
    "SECURITY.md": "security.md",
    "benchmarks/peers/README.md": "benchmarks/peers.md",
    **{f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted((ROOT / "examples").glob("*.py"))},
}
"""Files of the repository, and what each is called on the site."""

LINK = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?![a-z]+:)(?P<target>[^()#\s]+)(?P<anchor>#[^()\s]*)?\)")


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
    if PLACES[source] == "index.md":
        text = f"---\nhide: [navigation]\n---\n\n{text}"  # the front page has no neighbours
    return text if source.endswith(".md") else f"# {source}\n\n```python\n{text}```\n"


def with_links(markdown: str, source: str, place: str) -> str:
    """Links that are relative to `source` in the repository, made relative to `place` on the site.

    A link that is called by its file is called by the title of the page.

        with_links("see [data.md](data.md#rows), [it](../README.md)", "docs/api.md", "api.md")
        →  "see [Data](data.md#rows), [it](index.md)"
    """

    def moved(link: re.Match[str]) -> str:
        text, target, anchor = link["text"], link["target"], link["anchor"] or ""
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if file not in PLACES and not file.startswith("docs/"):
            return link[0]
        on_site = PLACES.get(file, file.removeprefix("docs/"))
        shown = title(file) if text.endswith(".md") and file.endswith(text) else text
        return f"[{shown}]({posixpath.relpath(on_site, posixpath.dirname(place) or '.')}{anchor})"

    return LINK.sub(moved, markdown)


def title(file: str) -> str:
    """The first heading of a page; its name where it has none, or is not there, which the build complains of."""
    path = ROOT / file
    found = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE) if path.is_file() else None
    return found[1] if found else file
