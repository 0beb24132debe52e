"""The samples of a group, and one sample token by token.

Texts of tokens come from the run's tokenizer, without loading a model or torch.
"""

import json
import math
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from kitae.data.pictures import FOLDER as PICTURES
from kitae.data.pictures import Shelf, as_data, sources_of, token_named
from kitae.errors import KitaeError, StoreError
from kitae.observe.token_numbers import read_tokens
from kitae.store.journal import Journal
from kitae.types import Chain, Message, Rollout
from kitae.ui.library import raw_settings
from kitae.ui.queries import brief_table, reading
from kitae.ui.records import ChainTokens, GroupView, SampleTokens, SampleView, TurnView


def group(run: Path, number: int) -> GroupView:
    journal = Journal(run / "journal.sqlite", read_only=True)
    try:
        prompt = journal.prompt(number)
        if prompt is None:
            raise StoreError(f"{run.name} has no group {number}")
        rollouts, suspended = journal.rollouts(number), len(journal.suspended(number))
    finally:
        journal.close()
    with reading(run) as db:
        fate = db.execute("SELECT step, fate, reason FROM fates WHERE group_id = ?", (number,)).fetchone()
        version = db.execute("SELECT version FROM prompts WHERE group_id = ?", (number,)).fetchone()[0]
        table = brief_table(db)
        before = db.execute(f"SELECT max(r.group_id) FROM {table} WHERE r.group_id < ?", (number,)).fetchone()[0]
        after = db.execute(f"SELECT min(r.group_id) FROM {table} WHERE r.group_id > ?", (number,)).fetchone()[0]
    return GroupView(
        group=number,
        prompt_id=prompt.id,
        messages=[_turn(run, message) for message in prompt.messages],
        reference=_text(prompt.reference),
        context=_text(dict(prompt.context)) if prompt.context else "",
        step=fate[0] if fate else None,
        fate=fate[1] if fate else "",
        reason=fate[2] if fate else "",
        version=version,
        samples=[_sample(run, rollout) for rollout in rollouts],
        suspended=suspended,
        previous=before,
        next=after,
    )


def _sample(run: Path, rollout: Rollout) -> SampleView:
    score = rollout.score
    assert score is not None  # the journal gives every rollout one
    versions = sorted({version for s in rollout.segments for version in s.versions if version >= 0})
    return SampleView(
        sample=rollout.index,
        value=score.value if score.valid else None,
        outcome=score.outcome,
        detail=score.detail,
        components={name: value for name, value in score.components.items() if math.isfinite(value)},
        finish=rollout.finish,
        status=rollout.status,
        length=rollout.response_length,
        turns=sum(s.source == "model" for s in rollout.segments),
        versions=versions,
        rewards=[s.reward for s in rollout.segments if s.reward is not None],
        text=_said(rollout),
        transcript=[_turn(run, message) for message in rollout.transcript],
    )


def _said(rollout: Rollout) -> str:
    """The text of a rollout, or the error where its file is damaged."""
    try:
        return str(rollout.text)
    except StoreError as error:
        return f"[{error}]"


def _turn(run: Path, message: Message) -> TurnView:
    parts = [str(part.get("text", f"[{part.get('image', part.get('type'))}]")) for part in message.parts]
    parts = parts or [message.content]
    calls = [
        f"{c.name}({', '.join(f'{name}={value!r}' for name, value in c.arguments.items())})" for c in message.calls
    ]
    pictures = [_picture(run, source) for source in sources_of([message])]
    return TurnView(message.role, "\n".join(filter(None, parts)), calls, message.name, list(filter(None, pictures)))


def _picture(run: Path, source: str) -> str:
    """A kept picture as a data: URL; nothing where it is not kept, as that of a prompt that was never encoded."""
    token = token_named(source)
    try:
        return as_data(Shelf(run / PICTURES).content(token)) if token is not None else ""
    except StoreError:
        return ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)


def tokens(run: Path, number: int, sample: int) -> SampleTokens:
    """The columns of the journal, and those that training recorded (`observe.tokens`)."""
    journal = Journal(run / "journal.sqlite", read_only=True)
    try:
        rollout = next((r for r in journal.rollouts(number) if r.index == sample), None)
    finally:
        journal.close()
    if rollout is None:
        raise StoreError(f"{run.name} has no sample {sample} of group {number}")
    with reading(run) as db:
        fate = db.execute("SELECT step FROM fates WHERE group_id = ?", (number,)).fetchone()
    noted = _noted(run, fate[0] if fate else None, number, sample)
    found = [_chain(run, chain, _of_chain(noted, i)) for i, chain in enumerate(rollout.chains)]
    return SampleTokens(number, sample, all(readable for _, readable in found), [view for view, _ in found])


def _chain(run: Path, chain: Chain, noted: Mapping[str, Sequence[float]]) -> tuple[ChainTokens, bool]:
    own = [token for segment in chain.segments for token in segment.tokens]
    by_model = [segment.source == "model" for segment in chain.segments for _ in segment.tokens]
    logprobs = [value for segment in chain.segments for value in segment.logprobs]
    versions = [value for segment in chain.segments for value in segment.versions]
    columns: dict[str, list[float | None]] = {
        "logprob": [_finite(value) if model else None for value, model in zip(logprobs, by_model, strict=True)],
        "version": [value if model else None for value, model in zip(versions, by_model, strict=True)],
    }
    for name, values in noted.items():
        if (laid_out := _laid_out(values, by_model, len(chain.prompt_tokens))) is not None:
            columns[name] = laid_out
    all_tokens = [*chain.prompt_tokens, *own]
    found = pieces(run, all_tokens)
    texts = found if found is not None else [f"{token} " for token in all_tokens]
    cut = len(chain.prompt_tokens)
    return ChainTokens(texts[:cut], own, texts[cut:], by_model, columns), found is not None


def _laid_out(values: Sequence[float], by_model: Sequence[bool], prompt: int) -> list[float | None] | None:
    """A recorded column, laid out over the tokens behind the prompt. It may have a value for each token of the chain,
    for each token behind the prompt, or for each token of the model; None where it has another length."""
    if len(values) == prompt + len(by_model):
        values = values[prompt:]
    if len(values) == len(by_model):
        return [_finite(value) if model else None for value, model in zip(values, by_model, strict=True)]
    if len(values) != sum(by_model):
        return None
    rest = iter(values)
    return [_finite(next(rest)) if model else None for model in by_model]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _noted(run: Path, step: int | None, number: int, sample: int) -> dict[str, Sequence[float]]:
    """The columns that `observe.tokens` recorded for a sample."""
    if step is None:
        return {}
    try:
        found = read_tokens(run, step)
    except StoreError:  # this step was not recorded, or its file is damaged
        return {}
    return {name: array.tolist() for name, array in found.get((number, sample), {}).items()}


def _of_chain(noted: Mapping[str, Sequence[float]], chain: int) -> dict[str, Sequence[float]]:
    """The values of one chain of a sample, without the columns that the journal has as well."""
    which = noted.get("chain")
    return {
        name: values if which is None else [value for value, of in zip(values, which, strict=True) if of == chain]
        for name, values in noted.items()
        if name not in ("chain", "version")
    }


_lock = threading.Lock()


def pieces(run: Path, tokens: list[int]) -> list[str] | None:
    """The text of each token; None where the tokenizer is not on this machine.

    Where several tokens make one character together, the last of them gets the character and the others are empty.
    """
    tokenizer = _tokenizer(_file(run))
    if tokenizer is None:
        return None
    with _lock:  # one decoder at a time: decoding is fast, and a tokenizer need not be safe for threads
        return _split(tokenizer, tokens)


def _split(tokenizer: Any, tokens: list[int]) -> list[str]:
    found, start = list[str](), 0
    before = ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[start:end], skip_special_tokens=False)
        if text.endswith("�") and end - start < _LONGEST_CHARACTER:
            found.append("")
            continue
        found.append(text[len(before) :] if text.startswith(before) else text)
        # The next token is decoded with this one before it: some decoders write a space only between tokens.
        start, before = end - 1, tokenizer.decode(tokens[end - 1 : end], skip_special_tokens=False)
    return found


_LONGEST_CHARACTER = 6  # tokens


def _file(run: Path) -> Path | None:
    """The tokenizer file of the trained model if there is one, else that of the model that the run began with."""
    if (own := run / "model" / "tokenizer.json").is_file():
        return own
    from kitae.models.load import find_model

    try:
        base = find_model(str(raw_settings(run).get("model.path", "")), download=False)
    except (KitaeError, OSError, ValueError):
        return None
    return found if base is not None and (found := base / "tokenizer.json").is_file() else None


@lru_cache(maxsize=4)
def _tokenizer(file: Path | None) -> Any:
    if file is None:
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises plain ones for files that it cannot read
        return None
