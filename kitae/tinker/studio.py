"""The work of a training server: requests of each model in their order, samples as they come, and what is saved.

    submit ─► ledger ─► line of the model ─► Core ─► ledger ─► whoever waits for the answer

A model computes its requests one after the other, by their numbers; requests of different models are computed
together. A model is saved when it was updated and a minute has passed. After a crash, a model begins with what was
saved last, and computes the requests that came after that again, to the same numbers but for rounding; their answers
stay as they were given. One that nobody has used for half an hour rests in its folder. Samples that were not answered
are drawn again, by the same seeds.
"""

import asyncio
import json
import logging
import shutil
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kitae.engines.base import stream_seed
from kitae.errors import KitaeError, RequestError, StoreError
from kitae.models.adapters import ATTENTION, MLP
from kitae.primitives.core import Core, Snapshot
from kitae.primitives.trained_model import AdamParams, TrainedModel
from kitae.tinker import weight_paths
from kitae.tinker.ledger import FAILED, JSON, PROTO, Answered, RequestLedger, SavedWeights, TinkerRequest
from kitae.tinker.messages import Json, as_json, read_pass, read_sample, write_pass, write_sample
from kitae.tinker.weight_paths import WeightPath

_log = logging.getLogger("kitae.tinker")
_SAVE_EVERY = 60.0  # seconds of updates that a crash may cost to compute again
_SNAPSHOTS = 32  # adapters to sample from that are held in memory
_OWN_SNAPSHOTS = 8  # of a model that nobody named, on disk
_REST_AFTER = 1800.0  # seconds without a request, after which a model is in its folder alone
_PASS_KINDS = {"forward_backward", "forward_backward+proto"}


class ModelLine:
    """A model that learns, and its requests by number. The first one is 1. model: None while it rests in its folder."""

    def __init__(self, name: str, model: TrainedModel | None, done: int) -> None:
        self.name, self.model = name, model
        self.done = done  # the number of the last request that was computed
        self.waiting: dict[int, TinkerRequest] = {}
        self.clean = True  # no gradients since the last update
        self.saved_at = self.used_at = time.monotonic()
        self.working: asyncio.Task[None] | None = None

    @property
    def awake(self) -> TrainedModel:
        assert self.model is not None, self.name
        return self.model


class Studio:
    """All models of a server. Made in the event loop that uses it; `start` first, `close` it there."""

    def __init__(self, core: Core, ledger: RequestLedger, folder: Path, name: str) -> None:
        """name: how clients call the base model."""
        self.core, self.ledger, self._folder, self._name = core, ledger, folder, name
        self._lines: dict[str, ModelLine] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: dict[str, asyncio.Event] = {}
        self._snapshots: OrderedDict[str, Snapshot] = OrderedDict()
        self._seed = int(ledger.fact("seed"), 16)
        self._stop_tokens = core.stop_tokens()

    async def start(self) -> None:
        """Take up what a server before this one has left."""
        for name, about in self.ledger.models().items():
            self._lines[name] = ModelLine(name, None, int(about["saved"]))
        for asked, answered in list(self.ledger.unfinished()):
            if (line := self._lines.get(asked.owner)) is not None and asked.number > 0:
                line.waiting[asked.number] = asked
                self._run(line)
            elif not answered:
                self._begin(asked)

    async def _restore(self, name: str) -> TrainedModel:
        about = self.ledger.models()[name]
        if (saved := self._state_folder(name, about["saved"])).is_dir():
            return await self.core.made_from(saved, optimizer=True)
        return await self.core.lora(about["rank"], seed=about["seed"], parts=about["parts"])

    def _state_folder(self, model: str, number: int) -> Path:
        """Of a model after a request; a folder that the ledger does not speak of was written and not noted."""
        return WeightPath(model, "weights", f"~after-{number}").folder(self._folder)

    async def close(self) -> None:
        tasks = [*self._tasks, *(line.working for line in self._lines.values() if line.working)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # What clients ask for.

    def submit(self, asked: TinkerRequest) -> None:
        """Take a request; one that was taken before is not taken again."""
        if asked.number and asked.owner in self._lines:
            line = self._lines[asked.owner]
            if asked.number <= line.done and not self.ledger.known(asked.id):
                raise RequestError(f"request {asked.number} of {asked.owner} was answered long ago, and is forgotten")
        if not self.ledger.take(asked):
            return
        if asked.number and asked.owner in self._lines:
            self._lines[asked.owner].waiting[asked.number] = asked
            self._run(self._lines[asked.owner])
        else:
            self._begin(asked)

    async def answer(self, request: str, seconds: float) -> Answered | None:
        """None: not within this time."""
        if not self.ledger.known(request):
            raise RequestError(f"there is no request {request!r} here")
        event = self._events.setdefault(request, asyncio.Event())
        if (found := self.ledger.answered(request)) is None:
            try:
                async with asyncio.timeout(seconds):
                    await event.wait()
            except TimeoutError:
                return None
            found = self.ledger.answered(request)
        self._events.pop(request, None)
        return found

    def line(self, model: str) -> ModelLine:
        if model not in self._lines:
            raise RequestError(f"there is no model {model!r} here")
        return self._lines[model]

    # Requests that do not belong to a line: models that are made, and samples.

    def _begin(self, asked: TinkerRequest) -> None:
        works: dict[str, Callable[[Json, TinkerRequest], Awaitable[Answered]]] = {
            "create_model": self._create, "load_model": self._load_new, "sample": self._sample,
        }  # fmt: skip
        task = asyncio.create_task(self._answer_with(asked, works[asked.kind], again=False))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_with(
        self, asked: TinkerRequest, work: Callable[[Json, TinkerRequest], Awaitable[Answered]], *, again: bool
    ) -> None:
        try:
            found = await work({} if asked.kind in _PASS_KINDS else as_json(asked.body), asked)
        except Exception as error:
            found = _failure(error)
        self._settle(asked, found, again=again)

    def _settle(self, asked: TinkerRequest, answered: Answered, *, again: bool) -> None:
        if self.ledger.answered(asked.id) is None:
            self.ledger.answer(asked.id, answered, again=again)
        if (event := self._events.get(asked.id)) is not None:
            event.set()

    async def _create(self, body: Json, asked: TinkerRequest) -> Answered:
        lora = body.get("lora_config")
        if not lora:
            raise RequestError("this server trains LoRA adapters, got no lora_config; whole models: kitae.primitives")
        self._check_base(body.get("base_model"))
        _check_optimizer(body.get("optimizer_config"))
        parts = [
            part for part, key in ((ATTENTION, "train_attn"), (MLP, "train_mlp")) if lora.get(key, True)
        ]  # fmt: skip
        seed = lora.get("seed")
        about: dict[str, Any] = {
            "rank": int(lora["rank"]), "parts": parts, "metadata": body.get("user_metadata") or {},
            "seed": stream_seed(self._seed, asked.owner) if seed is None else int(seed),
        }  # fmt: skip
        model = await self.core.lora(about["rank"], seed=about["seed"], parts=parts)
        self._add(asked.owner, str(body["session_id"]), about, model)
        return _json(model_id=asked.owner, type="create_model")

    async def _load_new(self, body: Json, asked: TinkerRequest) -> Answered:
        self._check_base(body.get("base_model") or self._name)
        path = self._find_saved(str(body["path"]), "training")
        optimizer = bool(body.get("optimizer"))
        model = await self.core.made_from(path.folder(self._folder), optimizer=optimizer)
        assert model.adapter is not None
        about = {
            "rank": model.adapter.rank, "metadata": body.get("user_metadata") or {}, "parts": _parts(model), "seed": 0,
        }  # fmt: skip
        line = self._add(asked.owner, str(body["session_id"]), about, model)
        await self._save_state(line)  # what it came from may be deleted
        return _json(path=str(path), model_id=asked.owner, type="load_weights")

    def _add(self, name: str, session: str, about: dict[str, Any], model: TrainedModel) -> ModelLine:
        self.ledger.add_model(name, session, about)
        self._lines[name] = ModelLine(name, model, 0)
        return self._lines[name]

    def _check_base(self, name: object) -> None:
        if name != self._name:
            raise RequestError(f"this server has the base model {self._name!r}, got {name!r}")

    def _find_saved(self, path: str, kind: str) -> WeightPath:
        found = weight_paths.parse(path)
        if self.ledger.saved(path) is None or not found.folder(self._folder).is_dir():
            raise RequestError(f"there are no saved weights {path}")
        if found.kind != kind:
            raise RequestError(f"{path} was saved as {found.kind} weights, and {kind} weights are needed")
        return found

    async def _sample(self, body: Json, asked: TinkerRequest) -> Answered:
        snapshot = await self._snapshot(self._weights_of(body))
        wanted = read_sample(body, self.core.policy.max_context, self._stop_tokens)
        seed = stream_seed(self._seed, asked.id) if wanted.seed is None else int(wanted.seed)
        answers = await self.core.sample(snapshot, wanted.prompt, wanted.params, wanted.samples, seed)
        prompt = top_prompt = tops = None
        count = len(wanted.prompt)
        if wanted.prompt_logprobs or wanted.top_prompt:
            scored = await self.core.score(snapshot, wanted.prompt, wanted.top_prompt)
            first = 1 if wanted.last is None else max(1, count - int(wanted.last))
            hidden = first - 1  # tokens after the first whose numbers nobody asked for
            prompt = [float("nan")] * first + list(scored.logprobs[hidden:])
            if wanted.top_prompt:
                top_prompt = [()] * first + list(scored.top[hidden:])
        if wanted.top_sampled:
            texts = ((*wanted.prompt, *answer.tokens) for answer in answers)
            all_scored = await asyncio.gather(*(self.core.score(snapshot, t, wanted.top_sampled) for t in texts))
            tops = [scored.top[count - 1 :] for scored in all_scored]
        scores = prompt if wanted.prompt_logprobs else None
        return Answered(PROTO, write_sample(answers, scores, top_prompt, tops))

    def _weights_of(self, body: Json) -> str:
        """The path of the weights that a sample is of; "": the base model."""
        if (session := body.get("sampling_session_id")) is not None:
            if (path := self.ledger.sampler(str(session))) is None:
                raise RequestError(f"there is no sampling session {session!r} here")
            return path
        if body.get("model_path"):
            return str(body["model_path"])
        self._check_base(body.get("base_model"))
        return ""

    async def _snapshot(self, path: str) -> Snapshot:
        if not path:
            return self.core.base
        if path not in self._snapshots:
            saved = weight_paths.parse(path)
            if self.ledger.saved(path) is None:
                kept = f"of those without a name, the last {_OWN_SNAPSHOTS} of a model are kept"
                raise RequestError(f"there are no weights {path}: {kept}")
            self._hold(path, await self.core.read_snapshot(saved.folder(self._folder)))
        self._snapshots.move_to_end(path)
        return self._snapshots[path]

    def _hold(self, path: str, snapshot: Snapshot) -> None:
        self._snapshots[path] = snapshot
        while len(self._snapshots) > _SNAPSHOTS:
            self._snapshots.popitem(last=False)

    # The lines.

    def _run(self, line: ModelLine) -> None:
        if line.working is None or line.working.done():
            line.working = asyncio.create_task(self._work(line))

    async def _work(self, line: ModelLine) -> None:
        """As long as the next request is there."""
        works: dict[str, Callable[[ModelLine, TinkerRequest], Awaitable[Answered]]] = {
            "forward_backward": self._pass, "forward_backward+proto": self._pass, "optim_step": self._optim_step,
            "save_weights": self._save, "save_weights_for_sampler": self._save_to_sample,
            "save_weights_external": self._save, "load_weights": self._load,
        }  # fmt: skip
        while (asked := line.waiting.pop(line.done + 1, None)) is not None:
            line.used_at = time.monotonic()
            line.model = line.model or await self._restore(line.name)
            request, work = asked, works[asked.kind]
            await self._answer_with(request, lambda _, a: work(line, a), again=True)  # noqa: B023
            line.done += 1
            due = request.kind == "optim_step" and time.monotonic() - line.saved_at > _SAVE_EVERY
            if line.clean and (due or request.kind == "load_weights"):  # what was loaded may be deleted
                await self._save_state(line)

    async def _save_state(self, line: ModelLine) -> None:
        folder = self._state_folder(line.name, line.done)
        await self.core.save(line.awake, folder)
        self.ledger.note_saved(line.name, line.done)
        for old in folder.parent.glob("~after-*"):
            if old != folder:
                shutil.rmtree(old)
        line.saved_at = time.monotonic()

    async def _pass(self, line: ModelLine, asked: TinkerRequest) -> Answered:
        kind = "application/x-protobuf" if asked.kind.endswith("+proto") else "application/json"
        wanted = await asyncio.to_thread(read_pass, asked.body, kind)
        if wanted.forward_only and (known := self.ledger.answered(asked.id)) is not None:
            return known
        backward = not wanted.forward_only
        line.clean = line.clean and not backward
        found = await self.core.forward(line.awake, wanted.data, wanted.loss, wanted.settings, backward=backward)
        return Answered(PROTO, write_pass(found, wanted.loss))

    async def _optim_step(self, line: ModelLine, asked: TinkerRequest) -> Answered:
        body = as_json(asked.body)
        if body.get("optimizer_params"):
            raise RequestError(f"this server has AdamW alone, got {body['optimizer_params'].get('type')!r}")
        known = AdamParams.__dataclass_fields__.keys()
        given = {k: float(v) for k, v in (body.get("adam_params") or {}).items() if k in known}
        update = await self.core.optim_step(line.awake, AdamParams(**given))
        line.clean = True
        norms = {"grad_norm:mean": update.norm, "skipped:sum": float(not update.applied)}
        return _json(metrics=norms, type="optim_step")

    async def _save(self, line: ModelLine, asked: TinkerRequest) -> Answered:
        body = as_json(asked.body)
        segment = "weights" if asked.kind == "save_weights" else "external_weights"
        path = weight_paths.named(line.name, segment, body.get("path"))
        if self.ledger.answered(asked.id) is None:
            await self._write(line, path, body, optimizer=segment == "weights")
        return _json(path=str(path), type=asked.kind)

    async def _save_to_sample(self, line: ModelLine, asked: TinkerRequest) -> Answered:
        body = as_json(asked.body)
        number = body.get("sampling_session_seq_id")
        name = body.get("path")
        path = (
            weight_paths.own(line.name, asked.number)
            if name is None
            else weight_paths.named(line.name, "sampler_weights", name)
        )
        if self.ledger.answered(asked.id) is None:
            await self._write(line, path, body, optimizer=False)
            self._hold(str(path), await self.core.snapshot(line.awake))
            self._drop_old_snapshots(line.name)
        if number is None:
            return _json(path=str(path), type="save_weights_for_sampler")
        session = line.name.partition(":")[0]
        sampler = f"{session}:sample:{int(number)}"
        self.ledger.add_sampler(sampler, session, str(path))
        return _json(path=None, sampling_session_id=sampler, type="save_weights_for_sampler")

    def _drop_old_snapshots(self, model: str) -> None:
        kept = [saved for saved in self.ledger.all_saved(model) if weight_paths.parse(saved.path).own]
        for saved in kept[_OWN_SNAPSHOTS:]:
            self.delete(saved.path)

    async def _write(self, line: ModelLine, path: WeightPath, body: Json, *, optimizer: bool) -> None:
        if path.kind == "training" and self.ledger.saved(str(path)) is not None and not body.get("overwrite"):
            raise RequestError(f"there are weights {path} already; overwrite=True replaces them")
        folder = path.folder(self._folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        await self.core.save(line.awake, folder, optimizer=optimizer)
        size, seconds = sum(f.stat().st_size for f in folder.iterdir()), body.get("ttl_seconds")
        expires = time.time() + seconds if seconds else None
        about = body.get("user_metadata") or {}
        self.ledger.add_saved(SavedWeights(str(path), line.name, path.kind, time.time(), size, expires, about))

    async def _load(self, line: ModelLine, asked: TinkerRequest) -> Answered:
        body = as_json(asked.body)
        path = self._find_saved(str(body.get("path")), "training")
        await self.core.load_into(line.awake, path.folder(self._folder), optimizer=bool(body.get("optimizer")))
        line.clean = True
        return _json(path=str(path), model_id=line.name, type="load_weights")

    def delete(self, path: str) -> None:
        """Delete saved weights, and what of them is in memory."""
        self.ledger.forget_saved(path)
        self._snapshots.pop(path, None)
        weight_paths.parse(path).remove(self._folder)

    def unload(self, model: str) -> None:
        """Forget a model that learns; what was saved of it stays."""
        line = self.line(model)
        if line.working is not None:
            line.working.cancel()
        del self._lines[model]
        self.ledger.forget_model(model)
        for folder in self._state_folder(model, 0).parent.glob("~after-*"):
            shutil.rmtree(folder, ignore_errors=True)

    async def tidy(self) -> None:
        """Put models to rest that nobody has used for long, and delete weights whose time is over."""
        for line in list(self._lines.values()):
            idle = line.working is None or line.working.done()
            if line.model is not None and idle and line.clean and time.monotonic() - line.used_at > _REST_AFTER:
                await self._save_state(line)
                if line.working is None or line.working.done():  # nobody came meanwhile
                    line.model = None
        for saved in self.ledger.all_saved():
            if saved.expires is not None and saved.expires < time.time():
                self.delete(saved.path)


def _json(**fields: object) -> Answered:
    return Answered(JSON, json.dumps(fields).encode())


def _failure(error: Exception) -> Answered:
    """What a client is told of an error: the sentence of one that is meant for users, of others their kind."""
    mine = not isinstance(error, RequestError | StoreError | KeyError | TypeError | ValueError)
    if isinstance(error, KitaeError):
        told = str(error)
    else:
        _log.error("a request failed", exc_info=error)
        told = (
            f"the server failed: {type(error).__name__}" if mine else f"a field is missing or of another kind: {error}"
        )
    return Answered(FAILED, json.dumps({"error": told, "category": "server" if mine else "user"}).encode())


def _check_optimizer(config: Any) -> None:
    if config and config.get("type", "adamw") != "adamw":
        raise RequestError(f"this server has AdamW alone, got the optimizer {config.get('type')!r}")


def _parts(model: TrainedModel) -> list[str]:
    assert model.adapter is not None
    return [part for part, key in ((ATTENTION, "attn"), (MLP, "mlp")) if any(key in n for n in model.adapter.factors)]
