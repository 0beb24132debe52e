"""Rollouts as rows of the journal, and back: what a row says itself, and what it says lies in files."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from kitae.errors import StoreError
from kitae.kept_sets import KeptSets, joined_sets
from kitae.store.columns import ColumnFiles, LazyColumn, StoredText, joined, record_of, stretches_of
from kitae.types import Chain, FinishReason, Message, Rollout, Runs, Score, Segment, ToolCall
from kitae.workers.frames import pack_frame, unpack_frame

_IN_FILES = 3  # parts of the shape of a segment that is not


def rollout_to_row(r: Rollout) -> tuple[Any, ...]:
    return (
        r.group,
        r.index,
        b"".join(np.array(chain.prompt_tokens, dtype=np.int32).tobytes() for chain in r.chains),
        json.dumps(_shapes(r)),
        *arrays_of(r.segments),
        r.finish,
        "" if r.text == _only_text(r.segments) else str(r.text),
        *verdict(r),
        r.status,
        messages_to_text(r.transcript),
        experts_to_blob(r.segments),
        kept_to_blob(r.segments),
    )


def verdict(r: Rollout) -> tuple[float | None, str, str, str]:
    score = r.score or Score.error("not scored")
    value = score.value if score.valid else None
    return value, score.outcome, json.dumps(dict(score.components)), score.detail


def _shapes(r: Rollout) -> list[Any]:
    """`[[3, [["model", 5, 0.5], ["environment", 2], ["model", 4]], "white"]]`: for each chain, the length of its
    prompt, its segments, with their rewards where there are any, and its role if it has one."""
    return [
        [len(chain.prompt_tokens), [shape_of(s) for s in chain.segments], *([chain.role] if chain.role else [])]
        for chain in r.chains
    ]


def shape_of(s: Segment) -> list[Any]:
    """`["model", 512, null, [[3, 512]], [["engine-0-5f3c9a1e", 6148, …]]]` where its columns lie in files: the runs of
    its versions, and where. The third is the reward, or reward, state and potential where the environment names one."""
    named = s.state or s.potential
    told: Any = [s.reward, s.state, s.potential] if named else s.reward
    if not isinstance(s.tokens, LazyColumn):
        return [s.source, len(s.tokens), *([] if told is None else [told])]
    return [s.source, len(s.tokens), told, Runs.of(s.versions).runs, record_of(s.tokens.stretches)]


def arrays_of(segments: Sequence[Segment]) -> tuple[bytes, bytes, bytes]:
    """Tokens, log-probs and versions, of all segments one after the other, but for those that lie in files."""
    own = [s for s in segments if not isinstance(s.tokens, LazyColumn)]
    runs = [run for s in own for run in Runs.of(s.versions).runs]
    return (
        b"".join(np.array(s.tokens, dtype=np.int32).tobytes() for s in own),
        b"".join(np.array(s.logprobs, dtype=np.float32).tobytes() for s in own),
        b"".join(np.full(count, version, dtype=np.int32).tobytes() for version, count in runs),
    )


def experts_to_blob(segments: Sequence[Segment]) -> bytes:
    """Of segments that have some, by their numbers; empty: none has."""
    known = {str(number): s.experts for number, s in enumerate(segments) if s.experts is not None}
    return pack_frame({}, known) if known else b""


def kept_to_blob(segments: Sequence[Segment]) -> bytes:
    """As `experts_to_blob`."""
    known = [(number, s.kept) for number, s in enumerate(segments) if s.kept is not None]
    named = {f"{number}/{name}": array for number, kept in known for name, array in kept.to_arrays().items()}
    return zlib.compress(pack_frame({}, named), 1) if named else b""


def messages_to_text(messages: Sequence[Message]) -> str:
    return json.dumps([asdict(m) for m in messages])


def rollout_of_row(row: tuple[Any, ...], files: ColumnFiles) -> Rollout:
    group, sample, prompts, shapes, tokens, logprobs, versions, finish, text, *rest = row
    value, outcome, components, detail, status, transcript, experts, kept = rest
    all_prompts = np.frombuffer(prompts, dtype=np.int32).tolist()
    values = _Values(tokens, logprobs, versions, experts, kept, files)
    chains = []
    read = 0
    for prompt, segments, *role in json.loads(shapes):
        own = tuple(all_prompts[read : read + prompt])
        chains.append(Chain(own, tuple(values.segment(*shape) for shape in segments), *role))
        read += prompt
    if not text and status == "complete":
        text = _only_text([s for chain in chains for s in chain.segments]) or ""
    score = Score(float("nan") if value is None else value, json.loads(components), outcome, detail)
    return Rollout(group, sample, tuple(chains), finish, text, score, status, messages_of_text(transcript))


class _Values:
    """The columns of a row, segment after segment."""

    def __init__(
        self, tokens: bytes, logprobs: bytes, versions: bytes, experts: bytes, kept: bytes, files: ColumnFiles
    ) -> None:
        kinds = (np.int32, np.float32, np.int32)
        self._columns = [np.frombuffer(b, k).tolist() for b, k in zip((tokens, logprobs, versions), kinds, strict=True)]
        self._experts: Mapping[str, Any] = unpack_frame(experts).arrays if experts else {}
        self._kept: Mapping[str, Any] = unpack_frame(zlib.decompress(kept)).arrays if kept else {}
        self._files = files
        self._start = self._number = 0

    def segment(self, source: Any, length: int, told: Any = None, runs: Any = (), record: Any = None) -> Segment:
        """The next one, by its shape."""
        experts, own = self._experts.get(str(self._number)), f"{self._number}/"
        mine = {name.removeprefix(own): array for name, array in self._kept.items() if name.startswith(own)}
        kept = KeptSets.of_arrays(mine)
        reward, *named = told if isinstance(told, list) else [told]
        self._number += 1
        if record is not None:
            lazy = self._files.lazy(stretches_of(record))
            return Segment(source, *lazy, Runs(runs), reward, experts, kept, *named)
        part = slice(self._start, self._start + length)
        self._start += length
        tokens, logprobs, versions = (tuple(column[part]) for column in self._columns)
        return Segment(source, tokens, logprobs, versions, reward, experts, kept, *named)


def _only_text(segments: Sequence[Segment]) -> StoredText | None:
    """The text of a rollout that is one answer, with its text in a file."""
    tokens = segments[0].tokens if len(segments) == 1 else ()
    return tokens.text if isinstance(tokens, LazyColumn) else None


def messages_of_text(text: str) -> tuple[Message, ...]:
    return tuple(
        Message(**{**row, "calls": tuple(ToolCall(**call) for call in row["calls"]), "parts": tuple(row["parts"])})
        for row in json.loads(text)
    )


def versions_of(chains: str, blob: bytes) -> set[int]:
    """All that a row has."""
    found = set(np.unique(np.frombuffer(blob, dtype=np.int32)).tolist())
    for _, segments, *_ in json.loads(chains):
        found |= {version for shape in segments if len(shape) > _IN_FILES for version, _ in shape[3]}
    return found


def last_of_piece(piece: Sequence[Any], experts: bytes, kept: bytes, files: ColumnFiles) -> Segment:
    """What a piece adds to the last segment."""
    _, shapes, tokens, logprobs, versions = piece
    return _Values(tokens, logprobs, versions, experts, kept, files).segment(*json.loads(shapes)[0][1][0])


def extended(r: Rollout, more: Segment, finish: FinishReason) -> Rollout:
    *chains, chain = r.chains
    *segments, last = chain.segments
    grown = replace(
        last,
        tokens=joined(last.tokens, more.tokens),
        logprobs=joined(last.logprobs, more.logprobs),
        versions=joined(last.versions, more.versions),
        experts=last.experts if more.experts is None else more.experts,
        kept=joined_sets([(last.kept, len(last.tokens)), (more.kept, len(more.tokens))]),
    )
    return replace(r, chains=(*chains, replace(chain, segments=(*segments, grown))), finish=finish)


def problem_of(r: Rollout) -> str:
    """Why what it has in files cannot be read; nothing: it can, or it has nothing there."""
    try:
        for kept in (s.tokens for s in r.segments if isinstance(s.tokens, LazyColumn)):
            np.asarray(kept)  # an answer is read as a whole, and so is its checksum
    except StoreError as error:
        return str(error)
    return ""


def filed_text(chains: str, files: ColumnFiles) -> str:
    """What a rollout said whose row has no text; nothing where it cannot be read: whoever opens it gets the reason."""
    shapes = [shape for _, segments, *_ in json.loads(chains) for shape in segments]
    found = _only_text(
        [_Values(b"", b"", b"", b"", b"", files).segment(*shape) for shape in shapes if len(shape) > _IN_FILES]
    )
    try:
        return str(found or "") if len(shapes) == 1 else ""
    except StoreError:
        return ""


def filed_length(chains: str) -> int:
    """Tokens that a row has in files."""
    return sum(shape[1] for shape in _in_files(chains))


def files_of(chains: str) -> set[str]:
    """The files that a row has something in."""
    return {place[0] for shape in _in_files(chains) for place in shape[4]}


def _in_files(chains: str) -> list[Any]:
    """The shapes of segments that lie there."""
    if '], [["' not in chains:  # between versions and places: most rows need not be parsed
        return []
    return [shape for _, segments, *_ in json.loads(chains) for shape in segments if len(shape) > _IN_FILES]
