"""vLLM from 0.32: tokens in and out by `/inference/v1/generate`, control by the routes of its developer mode.

A server that Kitae starts loads weights with `kitae.engines.servers.vllm_plugin` inside it, which takes checksums
there. One that is given by address reloads them from the folder by vLLM's own means, and the probe alone says what
arrived.

Every request has a cache salt of its version: a prompt computed with other weights is never found in the prefix cache,
also where running requests forbid that the cache is emptied (pipeline.in_flight = "keep").
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kitae.engines.base import Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.servers.dialect import Launch, StreamEvent, read_spans, read_version, spell
from kitae.engines.servers.server_client import Json, Line, LineLost, Refusal

_GENERATE = "/inference/v1/generate"
_PREFIX = "generate-tokens-"  # which vLLM puts before the name of a request
_EXTENSION = "kitae.engines.servers.vllm_plugin.KitaeWorker"
_TELL = 16  # tokens of a sequence that are sent at a time


class VLLM:
    """Implements `kitae.engines.servers.dialect.Dialect`. own: Kitae started the server, with its extension."""

    kind = "vLLM"
    alive = "/health"

    def __init__(self, *, own: bool) -> None:
        self._own = own
        self._seeds = True

    def command(self, launch: Launch, config: EngineConfig, port: int) -> list[str]:
        # On a CPU a request with a seed ends the server where prefill cuts its prompt: such generators cannot go back.
        self._seeds = not launch.device.startswith("cpu")
        options: dict[str, object] = {
            "model": launch.model,
            "host": "127.0.0.1",
            "port": port,
            "dtype": launch.dtype,
            "max-model-len": launch.context,
            "max-num-seqs": config.max_batch,
            "max-num-batched-tokens": max(config.prefill_tokens, config.max_batch),
            "logprobs-mode": "processed_logprobs",
            "worker-extension-cls": _EXTENSION,
            "stream-interval": _TELL,
            "generation-config": "vllm",
        }
        if not launch.device.startswith("cpu"):
            options["kv-cache-memory-bytes"] = int(config.memory_gb * 2**30)
        flags = ["enable-scale-out", "skip-tokenizer-init", "enable-prefix-caching", "enable-prompt-tokens-details"]
        flags += ["disable-uvicorn-access-log"]
        return ["-m", "vllm.entrypoints.openai.api_server", *spell(options, flags), *config.server_args]

    def environment(self, launch: Launch, config: EngineConfig) -> dict[str, str]:
        found = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(launch.packages)}
        if launch.device.startswith("cpu"):
            found["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(config.memory_gb)))  # whole GiB
            if launch.cores:
                found["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, launch.cores))
        return found

    def refusal(self, sampling: SamplingParams) -> str | None:
        if sampling.min_p and sampling.top_p < 1:
            return (
                "vLLM applies min_p before top_p, not after it: one of them must be off, got "
                f"{sampling.min_p:g} and {sampling.top_p:g}"
            )
        return None

    def request(self, name: str, request: Request, version: int) -> tuple[str, Json]:
        s, prior = request.sampling, request.prior.tokens
        sampling: dict[str, Any] = {
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": s.min_p,
            "max_tokens": s.max_tokens - len(prior),
            "stop_token_ids": list(s.stop_tokens),
            "seed": request.seed if self._seeds else None,
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        }
        return _GENERATE, {
            "request_id": name,
            "token_ids": [*request.prompt_tokens, *prior],
            "sampling_params": sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": f"version {version}",
        }

    def news(self, event: Json, known: int) -> StreamEvent:
        if not event["choices"]:
            details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
            return StreamEvent(cached=details.get("cached_tokens") or 0)
        (choice,) = event["choices"]
        content = (choice["logprobs"] or {"content": []})["content"]
        tokens = tuple(choice["token_ids"] or ())
        logprobs = tuple(float(told["logprob"]) for told in content)
        return StreamEvent(tokens, logprobs, choice["finish_reason"], read_spans(choice["weight_versions"]))

    async def greet(self, line: Line) -> None:
        try:
            await line.get("/weight_info")
        except Refusal as refused:
            raise Refusal(
                f"it must be vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out: {refused}"
            ) from None
        await self.resume(line)  # somebody may have left it paused
        await self._check_tokens_out(line)

    async def _check_tokens_out(self, line: Line) -> None:
        """That it gives tokens for tokens, with the log-prob of what was really sampled from."""
        sampling = {"max_tokens": 1, "logprobs": 2, "temperature": 0.5, "top_k": 1, "detokenize": False}
        answer = await line.post(_GENERATE, {"token_ids": [1, 2, 3], "sampling_params": sampling})
        told = answer["choices"][0]["logprobs"]["content"][0]
        if abs(told["logprob"]) > 1e-3:  # of the only token left it is 0
            raise Refusal(
                f"it must be started with --logprobs-mode processed_logprobs, got the log-prob {told['logprob']:.3g} "
                "for the only token that top_k = 1 leaves"
            )

    async def pause(self, line: Line) -> None:
        await line.post("/pause", mode="keep", clear_cache="false")

    async def resume(self, line: Line) -> None:
        await line.post("/resume")

    async def abort(self, line: Line, name: str) -> None:
        await line.post("/inference/v1/abort_requests", {"request_ids": [_PREFIX + name]})

    async def load(self, line: Line, folder: Path) -> Sequence[str]:
        if not self._own:
            await line.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            return ()
        answer = await line.post("/collective_rpc", {"method": "kitae_load", "args": [str(folder)]})
        found = [json.loads(told) for told in answer["results"]]
        if any("failed" in told for told in found):
            raise LineLost(f"it could not load the weights: {found}")
        return sorted({name for told in found for name in told["damaged"]})

    async def forget(self, line: Line, *, recompute: bool) -> None:
        """Without recompute, what running requests hold cannot be thrown away: the salt keeps new ones off it."""
        answer = await line.post("/reset_prefix_cache", reset_running_requests=str(recompute).lower())
        if recompute and not answer.get("success"):
            raise LineLost(f"it must empty its cache, got {answer}")

    async def label(self, line: Line, version: int) -> None:
        await line.post("/update_weight_version", {"new_version": str(version)})

    async def version(self, line: Line) -> int:
        return read_version((await line.get("/weight_info"))["weight_version"])

    async def score(self, line: Line, tokens: Sequence[int]) -> tuple[float, ...]:
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False, "temperature": 1.0}
        answer = await line.post(_GENERATE, {"token_ids": list(tokens), "sampling_params": sampling})
        told = answer["prompt_logprobs"][1:]
        return tuple(float(found[str(token)]["logprob"]) for token, found in zip(tokens[1:], told, strict=True))
