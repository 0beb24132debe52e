"""The addresses that Tinker's client knows, and what each answers."""

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kitae.errors import RequestError
from kitae.serving.api_keys import KeyRing
from kitae.serving.app import KeyGuard
from kitae.serving.http_bodies import json_response, receive_body, refusal_of
from kitae.serving.refusals import Refused
from kitae.serving.request_bodies import ReadingLimits
from kitae.tinker.ledger import FAILED, JSON, Answered, SavedWeights, TinkerRequest
from kitae.tinker.messages import MOST_SAMPLES, Json, as_json, json_of_pass, json_of_sample, whose_pass
from kitae.tinker.studio import Studio

_PROTO = "application/x-protobuf"
_WAIT = 20.0  # seconds that a question for an answer is held; the client gives up after 45
_LIMITS = ReadingLimits(body_bytes=128 * 2**20)
_FLAGS = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "use_pyqwest_transport": False,
    "custom_loss_server_side": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": True,
}
"""What the client asks for, and what it does itself: custom losses, in two passes, and no compression."""

Found = Mapping[str, Any]


class TinkerHandlers:
    """name: of the base model, as clients call it."""

    def __init__(self, studio: Studio, name: str) -> None:
        self._studio, self._ledger, self._name = studio, studio.ledger, name

    # What is answered at once.

    async def healthz(self, _: Request) -> Found:
        return {"status": "ok"}

    async def config(self, _: Request) -> Found:
        return _FLAGS

    async def dynamic_config(self, _: Request) -> Found:
        return {"refresh_interval_sec": 3600, "sample_cancel_enabled": False}

    async def telemetry(self, request: Request) -> Found:
        await _body(request)
        return {"status": "accepted"}

    async def capabilities(self, _: Request) -> Found:
        known = {
            "model_name": self._name, "max_context_length": self._studio.core.policy.max_context,
            "trainable": True, "sampleable": True,
        }  # fmt: skip
        return {"supported_models": [known]}

    async def create_session(self, request: Request) -> Found:
        body = as_json(await _body(request))
        name = secrets.token_hex(8)
        about = {key: body.get(key) for key in ("user_metadata", "display_name", "tags")}
        self._ledger.add_session(name, about)
        told = (
            "This server adapts attention and MLP; the unembedding takes no adapter here, whatever train_unembed says."
        )
        return {"type": "create_session", "session_id": name, "info_message": told}

    async def heartbeat(self, request: Request) -> Found:
        self._session(as_json(await _body(request)))
        await self._studio.tidy()
        return {"type": "session_heartbeat"}

    async def finish_session(self, request: Request) -> Found:
        await _body(request)
        return {}

    async def get_info(self, request: Request) -> Found:
        name = str(as_json(await _body(request)).get("model_id"))
        about = self._model(name)
        data = {"arch": type(self._studio.core.policy.base).__name__, "model_name": self._name}
        return {
            "type": "get_info", "model_id": name, "model_data": data, "is_lora": True, "lora_rank": about["rank"],
            "model_name": self._name, "optimizer_config": {"type": "adamw"},
        }  # fmt: skip

    async def create_sampling_session(self, request: Request) -> Found:
        body = as_json(await _body(request))
        session, path = self._session(body), str(body.get("model_path") or "")
        if path and self._ledger.saved(path) is None:
            raise Refused(f"there are no saved weights {path}", 404)
        if not path and body.get("base_model") != self._name:
            raise Refused(f"this server has the base model {self._name!r}, got {body.get('base_model')!r}", 404)
        name = f"{session}:sample:{int(body['sampling_session_seq_id'])}"
        self._ledger.add_sampler(name, session, path)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    async def join_sampling_session(self, request: Request) -> Found:
        name = str(as_json(await _body(request)).get("sampling_session_id"))
        if self._ledger.sampler(name) is None:
            raise Refused(f"there is no sampling session {name!r} here", 404)
        count = int(self._ledger.fact(f"clones of {name}", "0")) + 1
        self._ledger.set_fact(f"clones of {name}", str(count))
        return {"type": "join_sampling_session", "client_counter": count}

    async def unload(self, request: Request) -> Found:
        name = str(as_json(await _body(request)).get("model_id"))
        self._studio.unload(name)
        return {"type": "unload_model", "model_id": name}

    # What becomes a future.

    async def create_model(self, request: Request) -> Found:
        raw = await _body(request)
        body = as_json(raw)
        name = f"{self._session(body)}:train:{int(body['model_seq_id'])}"
        self._studio.submit(TinkerRequest(name, name, 0, "create_model", raw))
        return {"request_id": name, "model_id": name}

    async def load_weights(self, request: Request) -> Found:
        raw = await _body(request)
        body = as_json(raw)
        if body.get("session_id") is None:
            return self._in_line(str(body.get("model_id")), int(body.get("seq_id") or 0), "load_weights", raw)
        name = f"{self._session(body)}:train:{int(body['model_seq_id'])}"
        self._studio.submit(TinkerRequest(name, name, 0, "load_model", raw))
        return {"request_id": name, "model_id": name}

    async def forward_backward(self, request: Request) -> Found:
        raw = await receive_body(request, _LIMITS, kinds=("application/json", _PROTO))
        kind = request.headers.get("content-type", "")
        model, number = whose_pass(raw, kind)
        return self._in_line(model, number, "forward_backward+proto" if _PROTO in kind else "forward_backward", raw)

    def queued(self, kind: str) -> Callable[[Request], Awaitable[Found]]:
        """A handler of another request that a model computes in its order."""

        async def handle(request: Request) -> Found:
            raw = await _body(request)
            body = as_json(raw)
            return self._in_line(str(body.get("model_id")), int(body.get("seq_id") or 0), kind, raw)

        return handle

    def _in_line(self, model: str, number: int, kind: str, body: bytes) -> Found:
        line = self._studio.line(model)
        if number < 1:
            number = self._ledger.last_number(line.name) + 1
        name = f"{model}/{number}"
        self._studio.submit(TinkerRequest(name, model, number, kind, body))
        return {"request_id": name, "model_id": model}

    async def sample(self, request: Request) -> Found:
        raw = await _body(request)
        body = as_json(raw)
        owner = str(body.get("sampling_session_id") or "samples")
        number = body.get("seq_id")
        name = f"{owner}/{secrets.token_hex(8) if number is None else int(number)}"
        self._studio.submit(TinkerRequest(name, owner, 0, "sample", raw))
        count = int(body.get("num_samples") or 1)
        return {
            "request_id": name,
            "sample_sequence_ids": [f"{name}/{i}" for i in range(max(0, min(count, MOST_SAMPLES)))],
        }

    async def retrieve(self, request: Request) -> Response:
        name = str(as_json(await _body(request)).get("request_id"))
        found = await self._studio.answer(name, _WAIT)
        if found is None:
            again = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return json_response(again, 408)
        return self._as_sent(name, found, _PROTO in request.headers.get("accept", ""))

    def _as_sent(self, name: str, found: Answered, proto: bool) -> Response:
        if found.form in (JSON, FAILED):
            return Response(found.body, media_type="application/json")
        if proto:
            return Response(found.body, media_type=_PROTO)
        make = json_of_sample if self._ledger.kind(name) == "sample" else json_of_pass
        return json_response(make(found.body))

    # What is known of runs and weights.

    async def training_runs(self, request: Request) -> Found:
        runs = [self._run(name, about) for name, about in self._ledger.models().items()]
        return {"training_runs": _page(request, runs), "cursor": _cursor(request, len(runs))}

    async def training_run(self, request: Request) -> Found:
        name = request.path_params["model"]
        return self._run(name, self._model(name))

    async def checkpoints(self, request: Request) -> Found:
        found = [_checkpoint(saved) for saved in self._ledger.all_saved(request.path_params["model"])]
        return {"checkpoints": found}

    async def all_checkpoints(self, request: Request) -> Found:
        found = [_checkpoint(saved) for saved in self._ledger.all_saved()]
        return {"checkpoints": _page(request, found), "cursor": _cursor(request, len(found))}

    async def delete_checkpoint(self, request: Request) -> Found:
        self._studio.delete(self._saved(request).path)
        return {}

    async def expire_checkpoint(self, request: Request) -> Found:
        saved = self._saved(request)
        seconds = as_json(await _body(request)).get("ttl_seconds")
        expires = None if seconds is None else time.time() + float(seconds)
        self._ledger.add_saved(
            SavedWeights(saved.path, saved.model, saved.kind, saved.at, saved.bytes, expires, saved.about)
        )
        return {}

    async def publish(self, _: Request) -> Found:
        raise Refused("weights cannot be made public here: whoever has a key of this server sees them", 400)

    async def weights_info(self, request: Request) -> Found:
        path = str(as_json(await _body(request)).get("tinker_path"))
        saved = self._ledger.saved(path)
        if saved is None:
            raise Refused(f"there are no saved weights {path}", 404)
        about = self._ledger.models().get(saved.model, {})
        parts = about.get("parts", ())
        return {
            "base_model": self._name, "is_lora": True, "lora_rank": about.get("rank"), "train_unembed": False,
            "train_attn": "attention" in parts, "train_mlp": "mlp" in parts,
        }  # fmt: skip

    async def sessions(self, request: Request) -> Found:
        return {"sessions": _page(request, self._ledger.sessions())}

    async def session(self, request: Request) -> Found:
        name = request.path_params["session"]
        about = self._session_about(name)
        return {
            "training_run_ids": list(self._ledger.models(name)), "sampler_ids": self._ledger.samplers(name),
            "user_metadata": about.get("user_metadata"), "display_name": about.get("display_name"),
        }  # fmt: skip

    async def sampler(self, request: Request) -> Found:
        name = request.path_params["sampler"]
        path = self._ledger.sampler(name)
        if path is None:
            raise Refused(f"there is no sampling session {name!r} here", 404)
        return {"sampler_id": name, "base_model": self._name, "model_path": path or None}

    def _session(self, body: Json) -> str:
        name = str(body.get("session_id"))
        self._session_about(name)
        return name

    def _session_about(self, name: str) -> Found:
        found = self._ledger.session(name)
        if found is None:
            raise Refused(f"there is no session {name!r} here", 404)
        return found

    def _model(self, name: str) -> Found:
        found = self._ledger.models().get(name)
        if found is None:
            raise Refused(f"there is no model {name!r} here", 404)
        return found

    def _run(self, name: str, about: Found) -> Found:
        saved = self._ledger.all_saved(name)
        last = {kind: next((_checkpoint(s) for s in saved if s.kind == kind), None) for kind in ("training", "sampler")}
        return {
            "training_run_id": name, "base_model": self._name, "model_owner": "here", "is_lora": True,
            "lora_rank": about["rank"], "last_request_time": _time(about["at"]),
            "last_checkpoint": last["training"], "last_sampler_checkpoint": last["sampler"],
            "user_metadata": about.get("metadata"),
        }  # fmt: skip

    def _saved(self, request: Request) -> SavedWeights:
        path = f"tinker://{request.path_params['model']}/{request.path_params['checkpoint']}"
        found = self._ledger.saved(path)
        if found is None:
            raise Refused(f"there are no saved weights {path}", 404)
        return found


def _checkpoint(saved: SavedWeights) -> Found:
    return {
        "checkpoint_id": "/".join(saved.path.split("/")[-2:]), "checkpoint_type": saved.kind,
        "time": _time(saved.at), "tinker_path": saved.path, "size_bytes": saved.bytes, "public": False,
        "user_metadata": saved.about, "expires_at": None if saved.expires is None else _time(saved.expires),
    }  # fmt: skip


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _page(request: Request, found: list[Any]) -> list[Any]:
    limit, offset = _bounds(request)
    return found[offset : offset + limit]


def _cursor(request: Request, total: int) -> Found:
    limit, offset = _bounds(request)
    return {"offset": offset, "limit": limit, "total_count": total}


def _bounds(request: Request) -> tuple[int, int]:
    given = request.query_params
    try:
        return max(0, int(given.get("limit", 100))), max(0, int(given.get("offset", 0)))
    except ValueError:
        raise Refused("limit and offset must be whole numbers") from None


async def _body(request: Request) -> bytes:
    return await receive_body(request, _LIMITS)


def _endpoint(handler: Callable[[Request], Awaitable[Found | Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            found = await handler(request)
        except (KeyError, TypeError, ValueError) as error:
            refused = Refused(f"a field is missing or of another kind: {error}", 422)
            return json_response(refused.as_json(), refused.status)
        except Exception as error:
            refused = refusal_of(error)
            if type(error) is RequestError:  # of something that is not there
                refused = Refused(str(error), 404)
            return json_response(refused.as_json(), refused.status, refused.headers)
        return found if isinstance(found, Response) else json_response(found)

    return answer


def tinker_app(studio: Studio, name: str, host: str, keys: KeyRing) -> Starlette:
    h = TinkerHandlers(studio, name)
    posts: dict[str, Callable[[Request], Awaitable[Found | Response]]] = {
        "client/config": h.config, "client/dynamic_config": h.dynamic_config, "telemetry": h.telemetry,
        "create_session": h.create_session, "session_heartbeat": h.heartbeat,
        "sessions/{session}/finish": h.finish_session, "get_info": h.get_info, "unload_model": h.unload,
        "create_sampling_session": h.create_sampling_session, "join_sampling_session": h.join_sampling_session,
        "create_model": h.create_model, "load_weights": h.load_weights,
        "forward_backward": h.forward_backward, "forward": h.forward_backward, "asample": h.sample,
        "optim_step": h.queued("optim_step"), "save_weights": h.queued("save_weights"),
        "save_weights_for_sampler": h.queued("save_weights_for_sampler"),
        "save_weights_external": h.queued("save_weights_external"),
        "retrieve_future": h.retrieve, "weights_info": h.weights_info,
        "training_runs/{model}/checkpoints/{checkpoint:path}/publish": h.publish,
    }  # fmt: skip
    gets: dict[str, Callable[[Request], Awaitable[Found | Response]]] = {
        "healthz": h.healthz, "get_server_capabilities": h.capabilities, "training_runs": h.training_runs,
        "training_runs/{model}": h.training_run, "training_runs/{model}/checkpoints": h.checkpoints,
        "checkpoints": h.all_checkpoints, "sessions": h.sessions, "sessions/{session}": h.session,
        "samplers/{sampler}": h.sampler,
    }  # fmt: skip
    one = "/api/v1/training_runs/{model}/checkpoints/{checkpoint:path}"
    routes = [
        *(Route(f"/api/v1/{path}", _endpoint(handler), methods=["POST"]) for path, handler in posts.items()),
        *(Route(f"/api/v1/{path}", _endpoint(handler)) for path, handler in gets.items()),
        Route(f"{one}/ttl", _endpoint(h.expire_checkpoint), methods=["PUT"]),
        Route(one, _endpoint(h.delete_checkpoint), methods=["DELETE"]),
    ]
    return Starlette(routes=routes, middleware=[Middleware(KeyGuard, host=host, keys=keys)])
