"""Search in a folder of texts, as a tool: passages ranked by BM25, in memory.

It reads .txt and .md files, split at empty lines into passages of about 120 words, and .jsonl files, where each line is
an object with a text and possibly a title. A long text of a line is several passages.
"""

import asyncio
import json
import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path

from kitae.envs.tools.base import ToolRefusal, describe, shortened
from kitae.errors import ConfigError
from kitae.types import ToolCall

_WORDS = 120  # of a passage, approximately
_K1, _B = 1.2, 0.75  # BM25's saturation of repeated words, and penalty of long passages
_WORD = re.compile(r"\w+")
_TEXTS = ("text", "contents", "content", "body", "passage")  # keys of the text in .jsonl files
_SUFFIXES = (".txt", ".md", ".jsonl")
_LONGEST_QUERY = 64  # different words
_LONGEST = 1_000  # characters of a query, and of a passage that is shown


class Search:
    """An `EpisodeTool` on an index that all episodes share."""

    tool = describe("search", "Finds passages in a collection of texts.", query="Words to look for.")

    def __init__(self, index: "Index", results: int) -> None:
        self._index, self._results = index, results

    async def call(self, call: ToolCall) -> str:
        query = str(call.arguments["query"])
        if not query.strip():
            raise ToolRefusal("a query must have at least one word")
        found = await asyncio.to_thread(self._index.find, query[:_LONGEST], self._results)
        shown = [f"[{n}] {p.source}\n{shortened(p.text, _LONGEST)}" for n, p in enumerate(found, 1)]
        return "\n\n".join(shown) or "Nothing was found."

    async def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Excerpt:
    """`Excerpt("rivers.md", "The Amazon is …")`; source: the title, or the file."""

    source: str
    text: str


class Index:
    """`Index.of(Path("notes")).find("longest river", 3)`."""

    def __init__(self, passages: list[Excerpt]) -> None:
        self.passages = passages
        self._found: dict[
            str, tuple[array[int], array[int]]
        ] = {}  # for each word, the passages that have it, and how often
        self._lengths = array("l")
        gathered: dict[str, tuple[array[int], array[int]]] = defaultdict(lambda: (array("l"), array("l")))
        for number, passage in enumerate(passages):
            words = Counter(words_of(f"{passage.source} {passage.text}"))
            self._lengths.append(sum(words.values()))
            for word, count in words.items():
                where, counts = gathered[word]
                where.append(number)
                counts.append(count)
        self._found = dict(gathered)
        self._mean = sum(self._lengths) / max(1, len(passages))

    @classmethod
    def of(cls, folder: Path) -> "Index":
        """The index of a folder with its subfolders, or of a file. Raises `ConfigError` if there are no passages."""
        if not folder.exists():
            raise ConfigError(f"env.params.search.path: there is no {folder}")
        files = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
        passages = [p for file in files if file.suffix in _SUFFIXES for p in _passages(file, folder)]
        if not passages:
            raise ConfigError(
                f"env.params.search.path: {folder} must hold texts to search ({', '.join(_SUFFIXES)}), got none"
            )
        return cls(passages)

    def find(self, query: str, count: int) -> list[Excerpt]:
        """The best passages, best first, without those that share no word with the query."""
        scores: dict[int, float] = defaultdict(float)
        total = len(self.passages)
        for word in list(dict.fromkeys(words_of(query)))[:_LONGEST_QUERY]:
            where, counts = self._found.get(word, ((), ()))
            rarity = math.log(1 + (total - len(where) + 0.5) / (len(where) + 0.5))
            for number, often in zip(where, counts, strict=True):
                held_back = _K1 * (1 - _B + _B * self._lengths[number] / self._mean)
                scores[number] += rarity * often * (_K1 + 1) / (often + held_back)
        best = nlargest(count, scores, key=lambda number: (scores[number], -number))
        return [self.passages[number] for number in best]


def words_of(text: str) -> list[str]:
    """Words in lower case, without plural endings: `["river", "flow"]` of "Rivers flows"."""
    return [_stem(word) for word in _WORD.findall(text.lower())]


def _stem(word: str) -> str:
    """A word without the s of a plural."""
    if len(word) <= 3 or not word.endswith("s") or word.endswith(("ss", "us", "is")):
        return word
    return f"{word[:-3]}y" if word.endswith("ies") and len(word) > 4 else word[:-1]


def _passages(file: Path, folder: Path) -> Iterator[Excerpt]:
    name = file.name if file == folder else str(file.relative_to(folder))
    text = file.read_text("utf-8", errors="replace")
    if file.suffix != ".jsonl":
        yield from (Excerpt(name, piece) for piece in _pieces(text))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            title, said = _row(line, f"{file}:{number}")
            yield from (Excerpt(title or f"{name}:{number}", piece) for piece in _pieces(said))


def _row(line: str, where: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"env.params.search.path: {where} must be a JSON object, got {line[:60]!r}") from None
    texts = [row[key] for key in _TEXTS if isinstance(row.get(key), str)] if isinstance(row, dict) else []
    if not texts:
        raise ConfigError(f"env.params.search.path: {where} must have one of {', '.join(_TEXTS)}, got {line[:60]!r}")
    return str(row.get("title") or ""), texts[0]


def _pieces(text: str) -> Iterator[str]:
    """Paragraphs, joined until they are long enough; longer ones are split between words."""
    gathered: list[str] = []
    length = 0
    for paragraph in re.split(r"\n\s*\n", text):
        words = paragraph.split()
        if length and length + len(words) > _WORDS:
            yield "\n".join(gathered)
            gathered, length = [], 0
        while len(words) > 2 * _WORDS:
            yield " ".join(words[:_WORDS])
            words = words[_WORDS:]
        if words:
            gathered.append(" ".join(words))
            length += len(words)
    if gathered:
        yield "\n".join(gathered)
