"""`kitae verifiers`, `kitae verify` and `kitae validate`."""

import asyncio
import json
import os
import sys
import tomllib
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from kitae.cli.arguments import Overrides, Recipe
from kitae.cli.software import validate_tasks
from kitae.config.locate import find_recipe
from kitae.config.recipe import load_config
from kitae.config.root import reinforcement
from kitae.data.prompt_stream import open_stream
from kitae.errors import DataError, VerifierError
from kitae.observe.plain_output import terminal_of
from kitae.types import Prompt, Score
from kitae.verifiers.config import VerifierConfig
from kitae.verifiers.pool import VerifierPool
from kitae.verifiers.pool import validate as find_bad_gold
from kitae.verifiers.pool import validate_wrong as find_bad_wrong
from kitae.verifiers.score_calls import check_params
from kitae.verifiers.verifier_registry import VERIFIERS, resolve

_RIGHT = 0.5  # labels and scores above this say that an answer is right
_TESTS = 900.0  # seconds for the tests of a task folder
_WRONG = 16  # answers to other prompts that are tried
_GENERATED = 256  # problems of a task that has no end
_AHEAD = 16_384  # rows under way at most: many may hang without holding up the others


def verifiers() -> None:
    """List the verifiers, each with an example."""
    for name, verifier in VERIFIERS.items():
        summary = (verifier.score.__doc__ or "").strip().splitlines()[0]
        print(f"{name:16} {summary}")
        if example := verifier.example_for({}):
            response, reference = example
            print(f"{'':16} example: {_short(response)} against {_short(reference)} scores 1")
    print("\nfile.py:function  your own: (response, reference, context) → a number or a Score")
    print("\nscore a file with: kitae verify NAME --input in.jsonl --output out.jsonl [--option key=value …]")


def verify(
    name: Annotated[str, typer.Argument(help="A verifier (kitae verifiers), or file.py:function.")],
    source: Annotated[Path, typer.Option("--input", help="JSONL: id, response, reference, context.")],
    target: Annotated[Path, typer.Option("--output", help="JSONL: id, score, outcome, components, detail.")],
    option: Annotated[
        list[str] | None, typer.Option(help="A param of the verifier: key=value; may be repeated.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes; default: one for each core.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for one check.")] = 10.0,
) -> None:
    """Score a file of responses."""
    params = dict(_parse_option(text) for text in option or [])
    if ":" not in name:  # a user's own file is loaded by a worker, never here
        check_params(resolve(name), params)
    rows = list(_read(source))
    if target.exists() and target.resolve() == source.resolve():
        raise DataError(f"--output must be another file than --input, got {target}")
    began = perf_counter()
    scratch = target.with_name(f".{target.name}.partial")
    try:
        opened = scratch.open("w", encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write {target}: {error}") from error
    with opened as out, _progress(len(rows)) as advance:

        def write(row: dict[str, Any], score: Score) -> None:
            value = score.value if score.valid else None
            found = {"id": row["id"], "score": value, "outcome": score.outcome, "components": dict(score.components)}
            out.write(json.dumps({**found, "detail": score.detail}) + "\n")
            advance()

        try:
            scores = asyncio.run(_score(name, params, rows, workers or os.cpu_count() or 1, timeout, write))
        except BaseException:
            scratch.unlink()
            raise
    scratch.replace(target)
    _summarise(scores, perf_counter() - began, target)


def validate(
    recipe: Recipe,
    overrides: Overrides = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Check only so many prompts; default: all of a file.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="JSONL: response, reference, context, and the right score as label.")
    ] = None,
) -> None:
    """Check that reference answers score 1 under the verifier.

    Scores the references of a recipe's data with its verifier, and lists those that do not score 1. With --labels:
    scores these answers, and says how far it agrees with their labels.
    Of tasks for agents with a shell (a recipe with env.name = "shell", or a folder of tasks), the solution must pass
    and nothing must fail.
    """
    if Path(recipe).is_dir() and Path(recipe).suffix != ".toml":
        validate_tasks({"tasks": str(recipe), **_params(overrides or [])}, 1, _TESTS, limit)
        return
    config = reinforcement(load_config(find_recipe(recipe), overrides or []), "kitae validate")
    if labels is not None:
        _agree(config.verifier, list(_read(labels)), labels)
        return
    if config.env.name == "shell":
        validate_tasks(dict(config.env.params), config.env.turns, config.env.seconds, limit)
        return
    stream = open_stream(config.data, config.run.seed)
    prompts = [stream.at(position) for position in range(limit or stream.size or _GENERATED)]

    async def check() -> tuple[list[tuple[Prompt, Score]], list[tuple[Prompt, str, Score]], int]:
        settings = config.verifier
        async with VerifierPool(settings.name, settings.params, settings.workers, settings.timeout) as pool:
            known = sum(pool.gold(prompt) is not None for prompt in prompts)
            return await find_bad_gold(pool, prompts), await find_bad_wrong(pool, prompts[:_WRONG]), known

    bad, unjudged, known = asyncio.run(check())
    for prompt, score in bad:
        gold = prompt.reference if prompt.gold is None else prompt.gold
        found = f"{score.value:g}" if score.valid else "not judged"
        print(f"{prompt.id}: {_short(gold)} → {found} {score.detail.splitlines()[0] if score.detail else ''}".rstrip())
    print(
        f"{len(prompts)} prompts, {known} with a gold answer; {len(bad)} fail under verifier {config.verifier.name!r}"
    )
    for prompt, answer, score in unjudged:
        print(f"{prompt.id}: the wrong answer {_short(answer)} must be a 0 → not judged {score.detail}".rstrip())
    if bad or unjudged:
        raise SystemExit(1)


def _agree(verifier: VerifierConfig, rows: list[dict[str, Any]], source: Path) -> None:
    """Print how often verifier and labels agree that an answer is right, and what of that is more than chance."""
    if wrong := [r["id"] for r in rows if not isinstance(r.get("label"), int | float)]:
        raise DataError(f"each row of {source} must have a number as its label; row {wrong[0]} has none")
    scores = asyncio.run(
        _score(verifier.name, verifier.params, rows, verifier.workers, verifier.timeout, lambda row, score: None)
    )
    pairs = [(r["label"] > _RIGHT, s.value > _RIGHT) for r, s in zip(rows, scores, strict=True) if s.valid]
    if not pairs:
        raise DataError(f"none of the {len(rows)} answers could be judged: {scores[0].detail if scores else 'no rows'}")
    count = Counter(pairs)
    agreed = (count[True, True] + count[False, False]) / len(pairs)
    right, scored = (sum(pair[i] for pair in pairs) / len(pairs) for i in (0, 1))
    chance = right * scored + (1 - right) * (1 - scored)
    kappa = f"{(agreed - chance) / (1 - chance):.2f}" if chance < 1 else "–"
    print(f"{len(rows)} labelled answers, {len(rows) - len(pairs)} not judged; agreement {agreed:.3f}, kappa {kappa}")
    print(f"right and scored so {count[True, True]}, wrong and scored so {count[False, False]}")
    print(f"right but scored wrong {count[True, False]}, wrong but scored right {count[False, True]}")


def _params(overrides: list[str]) -> dict[str, Any]:
    """`["env.params.box=container"]`: of a folder of tasks, which has no recipe."""
    for override in overrides:
        if not override.startswith("env.params."):
            raise DataError(f"a folder of tasks takes env.params, got {override!r}")
    return dict(_parse_option(override.removeprefix("env.params.")) for override in overrides)


async def _score(
    name: str, params: dict[str, Any], rows: list[dict[str, Any]], workers: int, timeout: float, write: Any
) -> list[Score]:
    """Score all rows, many at a time; `write` gets them in the order of the file."""
    scores: list[Score] = []
    room = asyncio.Semaphore(_AHEAD)
    async with VerifierPool(name, params, workers, timeout) as pool:

        async def check(row: dict[str, Any]) -> Score:
            try:
                return await pool.score(row["response"], row.get("reference"), row.get("context") or {})
            finally:
                room.release()

        running: deque[tuple[dict[str, Any], asyncio.Task[Score]]] = deque()
        for row in rows:
            await room.acquire()
            running.append((row, asyncio.create_task(check(row))))
            while running and running[0][1].done():
                done, task = running.popleft()
                scores.append(task.result())
                write(done, scores[-1])
        for row, task in running:
            scores.append(await task)
            write(row, scores[-1])
    return scores


def _read(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not at U+2028 and the like, which JSON may hold
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number} is not JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get("response"), str):
            raise DataError(f"{path}:{number} must be an object with a text 'response', got {line[:80]}")
        if not isinstance(row.get("context") or {}, dict):
            raise DataError(f"{path}:{number}: 'context' must be an object, got {json.dumps(row['context'])[:80]}")
        yield {**row, "id": row.get("id", number)}


def _parse_option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise VerifierError(f"--option has the form key=value, got {text!r}")
    try:
        return key.strip(), tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def _summarise(scores: list[Score], seconds: float, target: Path) -> None:
    valid = [s.value for s in scores if s.valid]
    failed = Counter(s.detail.splitlines()[0][:100] if s.detail else "no reason" for s in scores if not s.valid)
    mean = f"{sum(valid) / len(valid):.4f}" if valid else "–"
    print(f"{len(scores)} rows in {seconds:.1f} s ({len(scores) / max(seconds, 1e-9):,.0f} a second)")
    print(f"mean score {mean}; {sum(v >= 1 for v in valid)} with full score, {len(scores) - len(valid)} not judged")
    for reason, count in failed.most_common(5):
        print(f"  not judged {count} times: {reason}")
    print(f"written to {target}")


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, transient=True, console=Console(file=terminal_of(sys.stdout))) as bar:
        task = bar.add_task("verifying", total=total)
        yield lambda: bar.advance(task)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return json.dumps(text if len(text) <= 60 else text[:57] + "…", ensure_ascii=False)
