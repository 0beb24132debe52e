"""The answers of an evaluation on disk, stored as they come, so that a killed evaluation continues where it was.

    DIR/smollm2-135m/gsm8k-3f9a1c02/answers.sqlite     a journal: prompts, answers, verdicts
    DIR/smollm2-135m/gsm8k-3f9a1c02/settings.json      the settings that the eight digits stand for

There is a folder for each model, suite and set of settings, so answers under different settings never mix. The numbers
of problems and of samples are not among these settings: more of them go into the same folder.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kitae.data.chat import as_dict
from kitae.errors import StoreError
from kitae.evaluation.suites import Suite
from kitae.plugins import is_plugin
from kitae.rl.config import EvalConfig
from kitae.store.journal import Journal
from kitae.store.run_folder import lock
from kitae.types import Group, Prompt

_SOURCE = {"path", "eval_path", "hub", "hub_files", "hub_eval_files", "skip_bad_rows"}
"""The source of prompts does not matter for an answer: each prompt is stored with it."""

_BLOCKS, _BLOCK = 128, 65_536  # pieces of a file of weights that are hashed, and their size


class Answers:
    """The answers of one model to one suite. The folder is locked, so only one process uses it at a time."""

    def __init__(self, output: Path, model: str, suite: str, settings: Mapping[str, Any]) -> None:
        text = json.dumps(settings, sort_keys=True)
        self.folder = output / _slug(model) / f"{_slug(suite)}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        try:
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make the folder {self.folder}: {error}") from error
        self._lock = lock(self.folder)
        try:
            self.journal = Journal(self.folder / "answers.sqlite")
            self._settings = text
        except StoreError:
            self._lock.close()
            raise

    async def begin(self, prompts: Sequence[Prompt]) -> None:
        """Record settings and prompts. Raises if the answers in the folder belong to other ones."""
        known = self.journal.meta("config")
        if known is not None and known != self._settings:
            raise StoreError(f"{self.folder} holds answers with other settings:\n  {known}\nnot\n  {self._settings}")
        new = []
        for index, prompt in enumerate(prompts):
            stored = self.journal.prompt(index)
            if stored is None:
                new.append((index, prompt))
            elif _asked(stored) != _asked(prompt):
                raise StoreError(
                    f"{self.folder} holds answers to other problems: number {index} was {stored.id}, is {prompt.id}, "
                    "or its text has changed. Remove the folder, or keep the new answers elsewhere with --output DIR"
                )
        await self.journal.begin(self._settings, [("start", f"{len(prompts)} prompts")])
        (self.folder / "settings.json").write_text(json.dumps(json.loads(self._settings), indent=2) + "\n")
        await asyncio.gather(*(self.journal.add_prompt(i, prompt, version=0, slot=i) for i, prompt in new))

    def complete(self, prompts: Sequence[Prompt], samples: int) -> list[Group] | None:
        """All answers if all exist and are judged, else None."""
        groups = []
        for index, prompt in enumerate(prompts):
            rollouts = tuple(r for r in self.journal.rollouts(index) if 0 <= r.index < samples)
            if len(rollouts) < samples or not all(r.score and r.score.valid for r in rollouts):
                return None
            groups.append(Group(index, prompt, rollouts))
        return groups

    def close(self) -> None:
        self.journal.close()
        self._lock.close()


def fingerprint(model: Path) -> str:
    """A digest of the weights in a model folder, from 128 pieces of each file, as no training step leaves all of them
    unchanged. A copy of the folder has the same digest."""
    digest = hashlib.sha256()
    weights = [path for end in ("safetensors", "bin") for path in sorted(model.glob(f"*.{end}"))]
    for path in [*weights, *(p for name in ("config.json", "chat_template.jinja") if (p := model / name).is_file())]:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for start in sorted({(size - _BLOCK) * i // (_BLOCKS - 1) for i in range(_BLOCKS)}):
                file.seek(max(0, start))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:16]


def how_asked(suite: Suite, settings: EvalConfig, seed: int) -> dict[str, Any]:
    """The settings, apart from the model, that an answer and its verdict depend on."""
    verifier, params = suite.verifier
    data = suite.data.model_dump(mode="json", exclude=_SOURCE)
    return {
        "data": data,
        "verifier": verifier,
        "params": dict(params),
        "own files": plugin_digests([data, verifier, params, suite.env.name]),
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": settings.min_p,
        "max_tokens": settings.max_tokens or suite.max_tokens,
        "stop": list(suite.stop),
        "env": suite.env.model_dump(mode="json"),
        "label": suite.label,
        "seed": seed,
    }


def plugin_digests(values: Any) -> dict[str, str]:
    """Digests of the user's own files that settings name: `{"reward.py:score": "9f86d081…"}`."""
    found = {}
    for text in _texts(values):
        if is_plugin(text) and (path := Path(text.rpartition(":")[0]).expanduser()).is_file():
            found[text] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _texts(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _texts(value)


def _asked(prompt: Prompt) -> str:
    return json.dumps([[as_dict(m) for m in prompt.messages], prompt.reference])


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "unnamed"
