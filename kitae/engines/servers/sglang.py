"""SGLang, as the schema of 0.5.23 describes it. No build of it runs on a CPU: this was tried against a stand-in alone.

Weights are loaded from a folder (`/update_weights_from_disk`). What is in flight is always computed again after an
update: it is retracted, because a cache that running requests use cannot be emptied.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kitae.engines.base import Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.servers.dialect import Launch, StreamEvent, read_spans, read_version, spell
from kitae.engines.servers.server_client import Json, Line, LineLost, Refusal

_GENERATE = "/generate"


class SGLang:
    """Implements `kitae.engines.servers.dialect.Dialect`."""

    kind = "SGLang"
    alive = "/model_info"  # /health samples a token, which a paused server never does

    def command(self, launch: Launch, config: EngineConfig, port: int) -> list[str]:
        options: dict[str, object] = {
            "model-path": launch.model,
            "host": "127.0.0.1",
            "port": port,
            "dtype": launch.dtype,
            "context-length": launch.context,
            "max-running-requests": config.max_batch,
            "chunked-prefill-size": config.prefill_tokens,
            "device": launch.device.partition(":")[0],
        }
        return ["-m", "sglang.launch_server", *spell(options, ["skip-tokenizer-init"]), *config.server_args]

    def environment(self, launch: Launch, config: EngineConfig) -> dict[str, str]:
        return {}

    def refusal(self, sampling: SamplingParams) -> str | None:
        if sampling.top_p < 1 or sampling.top_k or sampling.min_p:
            return (
                "SGLang's log-probs are those before top_p, top_k and min_p: all must be off, got "
                f"{sampling.top_p:g}, {sampling.top_k} and {sampling.min_p:g}"
            )
        return None

    def request(self, name: str, request: Request, version: int) -> tuple[str, Json]:
        s, prior = request.sampling, request.prior.tokens
        sampling: dict[str, Any] = {
            "temperature": s.temperature,
            "max_new_tokens": s.max_tokens - len(prior),
            "stop_token_ids": list(s.stop_tokens),
            "ignore_eos": True,
            "no_stop_trim": True,
            "sampling_seed": request.seed % 2**31,
        }
        return _GENERATE, {
            "rid": name,
            "input_ids": [*request.prompt_tokens, *prior],
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
            "cache_salt": f"version {version}",
        }

    def news(self, event: Json, known: int) -> StreamEvent:
        """A server sends all tokens so far each time, or only new ones: `completion_tokens` says how many."""
        meta = event["meta_info"]
        new = int(meta["completion_tokens"]) - known
        told = meta.get("output_token_logprobs") or []
        tokens = tuple(event["output_ids"][-new:]) if new else ()
        logprobs = tuple(float(each[0]) for each in told[-new:]) if new else ()
        finish = (meta.get("finish_reason") or {}).get("type")
        if finish is None:
            return StreamEvent(tokens, logprobs)
        return StreamEvent(
            tokens, logprobs, finish, read_spans(meta.get("weight_versions")), int(meta["cached_tokens"])
        )

    async def greet(self, line: Line) -> None:
        told = await line.get("/model_info")
        if "weight_version" not in told:
            raise Refusal(f"it must be SGLang 0.5.23 or newer, whose /model_info has a weight_version, got {told}")
        await self.resume(line)  # somebody may have left it paused

    async def pause(self, line: Line) -> None:
        await line.post("/pause_generation", {"mode": "retract"})

    async def resume(self, line: Line) -> None:
        await line.post("/continue_generation", {})

    async def abort(self, line: Line, name: str) -> None:
        await line.post("/abort_request", {"rid": name})

    async def load(self, line: Line, folder: Path) -> Sequence[str]:
        answer = await line.post("/update_weights_from_disk", {"model_path": str(folder), "flush_cache": True})
        if not answer.get("success"):
            raise LineLost(f"it could not load the weights: {answer}")
        return ()

    async def forget(self, line: Line, *, recompute: bool) -> None:
        await line.post("/flush_cache")

    async def label(self, line: Line, version: int) -> None:
        await line.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def version(self, line: Line) -> int:
        return read_version((await line.get("/model_info"))["weight_version"])

    async def score(self, line: Line, tokens: Sequence[int]) -> tuple[float, ...]:
        sampling = {"max_new_tokens": 1, "temperature": 1.0}
        body = {"input_ids": list(tokens), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        answer = await line.post(_GENERATE, body)
        return tuple(float(told[0]) for told in answer["meta_info"]["input_token_logprobs"][1:])
