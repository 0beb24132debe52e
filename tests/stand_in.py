"""A server that speaks as vLLM 0.32 or SGLang 0.5.23 does, on Kitae's native engine: their routes, bodies and answers.

It has their bad habits too, as far as they are known: a tensor that it does not know ends the server, and so does a
token that the embedding does not have; a paused server answers nothing; requests that it does not know cannot be
aborted. `StandIn(policy, "vllm").serve()` in the running event loop, or as a program of its own:

    python tests/stand_in.py vllm --model FOLDER --port 8001
"""

import argparse
import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request as Asked
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kitae.engines.base import Completion, Request, Sampled, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.engines.servers.tensor_files import Written
from kitae.models.policy import Policy

_TICK = 0.02  # seconds between two pieces of a stream
_BLOCK = 4  # tokens: of a prompt, the prefix cache finds whole blocks


class StandIn:
    """stale: it keeps the weights it has. lies: of its log-probs, which the probe does not show."""

    def __init__(self, policy: Policy, kind: str, *, end: Callable[[], None] = lambda: os._exit(1)) -> None:
        self.policy = policy
        self.kind = kind
        # In plain torch: answers last long enough for things to happen to them, as those of a large model do.
        self.engine = NativeEngine(policy, EngineConfig(memory_gb=0.02), 0, plain=True)
        self.label = "default"
        self.recompute = True
        self.stale = False
        self.lies = False
        self.paused = False
        self.dead = False
        self.calls: list[str] = []
        self.seen: set[tuple[int, ...]] = set()  # prompts that were computed since the cache was emptied
        self._end = end
        self._server: uvicorn.Server | None = None

    # Serving.

    def app(self) -> Starlette:
        table = self._vllm_routes() if self.kind == "vllm" else self._sglang_routes()
        return Starlette(routes=[Route(path, self._guarded(path, f), methods=["GET", "POST"]) for path, f in table])

    def _guarded(self, path: str, handler: Any) -> Any:
        async def handle(request: Asked) -> Response:
            self.calls.append(path)
            if self.dead:
                return Response("EngineCore encountered an issue", 503 if path == "/health" else 500)
            answer: Response = await handler(request)
            return answer

        return handle

    async def serve(self) -> str:
        """Its address, once it answers."""
        taken = socket.socket()
        taken.bind(("127.0.0.1", 0))
        self._server = uvicorn.Server(uvicorn.Config(self.app(), log_level="error", lifespan="off"))
        self._task = asyncio.create_task(self._server.serve(sockets=[taken]))
        while not self._server.started:
            await asyncio.sleep(0.01)
        return f"http://127.0.0.1:{taken.getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._task
        await self.engine.close()

    def die(self) -> None:
        """As when the process of the engine is killed: the server is there a little longer."""
        self.dead = True

    # What both kinds do.

    async def _pause(self, request: Asked) -> Response:
        self.paused = True
        await self.engine.pause()
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Asked) -> Response:
        self.paused = False
        await self.engine.resume()
        return JSONResponse({"status": "resumed"})

    async def _set_label(self, request: Asked) -> Response:
        self.label = (await request.json())["new_version"]
        paused = self.paused
        await self.engine.update_weights(WeightUpdate(int(self.label), None, self.recompute))
        if not paused:
            await self.engine.resume()
        return JSONResponse({"success": True, "new_version": self.label})

    def _load(self, tensors: dict[str, Any]) -> None:
        parameters = dict(self.policy.model.named_parameters())
        if not tensors.keys() <= parameters.keys():
            self.die()
            self._end()
            raise KeyError(f"unknown tensors {sorted(tensors.keys() - parameters.keys())}")
        for name, tensor in tensors.items() if not self.stale else ():
            parameters[name].data.copy_(tensor)

    async def _score(self, tokens: list[int]) -> list[float]:
        import torch

        while self.paused:
            await asyncio.sleep(_TICK)
        await self.engine.pause()
        try:
            scores: list[float] = (await asyncio.to_thread(self.policy.score, torch.tensor(tokens))).tolist()
        finally:
            if not self.paused:
                await self.engine.resume()
        return scores

    def _check(self, tokens: list[int]) -> None:
        if max(tokens) >= self.policy.vocabulary:
            self.die()
            self._end()

    def _cached(self, prompt: tuple[int, ...]) -> int:
        found = len(prompt) // _BLOCK * _BLOCK if prompt in self.seen else 0
        self.seen.add(prompt)
        return found

    async def _pieces(self, request: Request) -> AsyncIterator[tuple[Sampled, Completion | None]]:
        """What is new, and at last the whole."""
        working = asyncio.create_task(self.engine.generate(request))
        known = 0
        try:
            while not working.done():
                await asyncio.wait({working}, timeout=_TICK)
                grown = self.engine.progress({request.id: known}).get(request.id)
                if grown is not None and grown.tokens and not working.done():
                    known += len(grown.tokens)
                    yield grown, None
                if self.dead:
                    raise ConnectionError
            done = working.result()
            yield done.sampled.after(known), done
        finally:
            working.cancel()

    @staticmethod
    def _spans(done: Completion) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for position, version in enumerate(done.versions):
            if not spans or spans[-1]["version"] != str(version):
                spans.append({"version": str(version), "start": position, "end": position})
            spans[-1]["end"] = position + 1
        return spans

    # vLLM.

    def _vllm_routes(self) -> list[tuple[str, Any]]:
        return [
            ("/health", self._healthy),
            ("/weight_info", self._weight_info),
            ("/pause", self._pause),
            ("/resume", self._resume),
            ("/update_weight_version", self._set_label),
            ("/reset_prefix_cache", self._reset),
            ("/collective_rpc", self._rpc),
            ("/inference/v1/generate", self._vllm_generate),
            ("/inference/v1/abort_requests", self._vllm_abort),
        ]

    async def _healthy(self, request: Asked) -> Response:
        return Response()

    async def _weight_info(self, request: Asked) -> Response:
        return JSONResponse({"weight_version": self.label})

    async def _reset(self, request: Asked) -> Response:
        running = self.engine.stats().running
        self.recompute = request.query_params["reset_running_requests"] == "true"
        success = self.recompute or not running
        if success:
            self.seen.clear()
        return JSONResponse({"success": success})

    async def _rpc(self, request: Asked) -> Response:
        body = await request.json()
        try:
            if body["method"] == "kitae_load":
                written = Written(Path(body["args"][0]))
                damaged = written.damaged()
                if not damaged:
                    self._load(dict(written.tensors()))
                return JSONResponse({"results": [json.dumps({"damaged": damaged})]})
            self._load(load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors"))
        except KeyError as error:
            return Response(str(error), 500)
        return JSONResponse({"results": [None]})

    async def _vllm_generate(self, request: Asked) -> Response:
        body = await request.json()
        s, tokens = body["sampling_params"], body["token_ids"]
        self._check(tokens)
        if "prompt_logprobs" in s:
            scores = await self._score(tokens)
            told = [None, *({str(t): {"logprob": x}} for t, x in zip(tokens[1:], scores, strict=True))]
            return JSONResponse({"prompt_logprobs": told, "choices": []})
        params = SamplingParams(
            temperature=s["temperature"],
            max_tokens=s["max_tokens"],
            top_k=s.get("top_k", 0),
            stop_tokens=tuple(s.get("stop_token_ids", ())),
        )
        name = body.get("request_id", "unnamed")
        asked = Request(f"generate-tokens-{name}", tuple(tokens), params, s.get("seed") or 0, share=str(tokens))
        if not body.get("stream"):
            done = await self.engine.generate(asked)
            content = [{"token_id": t, "logprob": x} for t, x in zip(done.tokens, done.logprobs, strict=True)]
            return JSONResponse({"choices": [{"token_ids": list(done.tokens), "logprobs": {"content": content}}]})
        return StreamingResponse(self._vllm_stream(asked), media_type="text/event-stream")

    async def _vllm_stream(self, asked: Request) -> AsyncIterator[str]:
        try:
            async for news, done in self._pieces(asked):
                false = 0.7 if self.lies else 0.0
                content = [
                    {"token_id": t, "logprob": x - false} for t, x in zip(news.tokens, news.logprobs, strict=True)
                ]
                choice = {
                    "index": 0,
                    "finish_reason": done.finish if done else None,
                    "token_ids": list(news.tokens),
                    "weight_versions": self._spans(done) if done else None,
                    "logprobs": {"content": content},
                }
                yield _event({"choices": [choice], "usage": None})
        except ConnectionError:
            yield _event({"error": {"message": "EngineCore encountered an issue", "code": 500}})
        except Exception as error:
            yield _event({"error": {"message": str(error), "code": 400}})
        details = {"cached_tokens": self._cached(asked.prompt_tokens)}
        yield _event({"choices": [], "usage": {"prompt_tokens_details": details}})
        yield "data: [DONE]\n\n"

    async def _vllm_abort(self, request: Asked) -> Response:
        for name in (await request.json())["request_ids"]:
            await self.engine.abort(name)
        return Response()

    # SGLang.

    def _sglang_routes(self) -> list[tuple[str, Any]]:
        return [
            ("/model_info", self._model_info),
            ("/pause_generation", self._pause),
            ("/continue_generation", self._resume),
            ("/update_weight_version", self._set_label),
            ("/flush_cache", self._flush),
            ("/update_weights_from_disk", self._from_disk),
            ("/generate", self._sglang_generate),
            ("/abort_request", self._sglang_abort),
        ]

    async def _model_info(self, request: Asked) -> Response:
        return JSONResponse({"model_path": "m", "weight_version": self.label})

    async def _flush(self, request: Asked) -> Response:
        self.recompute = True
        self.seen.clear()
        return Response("Cache flushed.\n")

    async def _from_disk(self, request: Asked) -> Response:
        try:
            self._load(load_file(Path((await request.json())["model_path"]) / "model.safetensors"))
        except KeyError as error:
            return JSONResponse({"success": False, "message": str(error)}, 400)
        return JSONResponse({"success": True, "message": "Succeeded to update model weights."})

    async def _sglang_generate(self, request: Asked) -> Response:
        body = await request.json()
        s, tokens = body["sampling_params"], body["input_ids"]
        self._check(tokens)
        if body.get("logprob_start_len") == 0:
            scores = await self._score(tokens)
            told = [[None, tokens[0], None], *([x, t, None] for t, x in zip(tokens[1:], scores, strict=True))]
            return JSONResponse({"output_ids": [0], "meta_info": {"input_token_logprobs": told}})
        assert s["no_stop_trim"], "a stop token would be taken off"
        params = SamplingParams(
            temperature=s["temperature"], max_tokens=s["max_new_tokens"], stop_tokens=tuple(s["stop_token_ids"])
        )
        asked = Request(body["rid"], tuple(tokens), params, s["sampling_seed"], share=str(tokens))
        return StreamingResponse(self._sglang_stream(asked), media_type="text/event-stream")

    async def _sglang_stream(self, asked: Request) -> AsyncIterator[str]:
        tokens: list[int] = []
        logprobs: list[float] = []
        try:
            async for news, done in self._pieces(asked):
                tokens += news.tokens
                logprobs += news.logprobs
                meta: dict[str, Any] = {
                    "id": asked.id,
                    "finish_reason": None,
                    "completion_tokens": len(tokens),
                    "cached_tokens": 0,
                    "output_token_logprobs": [[x, t, None] for t, x in zip(tokens, logprobs, strict=True)],
                }
                if done is not None:
                    meta |= {"finish_reason": {"type": done.finish}, "weight_versions": self._spans(done)}
                    meta["cached_tokens"] = self._cached(asked.prompt_tokens)
                yield _event({"output_ids": tokens, "meta_info": meta})
        except ConnectionError:
            return  # the connection breaks off
        except Exception as error:
            yield _event({"error": {"message": str(error), "type": "invalid_request_error", "code": 400}})
        yield "data: [DONE]\n\n"

    async def _sglang_abort(self, request: Asked) -> Response:
        await self.engine.abort((await request.json())["rid"])
        return Response()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def main(kind: str, model_flag: str) -> None:
    """With the command line of the real one; what it does not know of it is of no importance here."""
    import torch

    from kitae.models.config import ModelConfig
    from kitae.models.load import load_policy

    parser = argparse.ArgumentParser()
    parser.add_argument(model_flag, dest="model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--lies", action="store_true")
    known, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    policy = load_policy(ModelConfig(path=known.model, dtype="float32", device="cpu"))
    server = StandIn(policy, kind)
    server.lies = known.lies
    uvicorn.run(server.app(), port=known.port, log_level="error", lifespan="off")
