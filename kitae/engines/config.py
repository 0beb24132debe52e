"""Settings of engines and of sampling."""

from collections.abc import Iterator
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from kitae.section import Section

_HERE = ("127.0.0.1", "localhost", "::1")
_OF_STARTED = ("count", "memory_gb", "max_batch", "prefill_tokens", "server_args")
_OF_AN_ENGINE = ("host_memory_gb", "cache_dtype", "weights_dtype")


class SamplingConfig(Section):
    """How training rollouts are sampled."""

    temperature: float = Field(1.0, gt=0, description="Log-probs of engine and trainer are both taken at it.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus sampling. The trainer's log-probs are over the tokens that the engine kept.",
    )
    top_k: int = Field(0, ge=0, description="Keep only the k likeliest tokens; 0: all.")
    min_p: float = Field(0.0, ge=0, lt=1, description="Drop tokens less likely than this share of the likeliest.")
    max_tokens: int = Field(64, ge=1, description="Most tokens in one response.")
    stop: tuple[str, ...] = Field((), description="Strings that end a response.")

    @property
    def truncates(self) -> bool:
        """Whether tokens are left out."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class ProofConfig(Section):
    """Proofs that an engine on a machine that is not trusted computed what it says."""

    share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the answers that the trainer computes again when they arrive, as far as it still has the "
        "weights that sampled them. An engine that fails is out, and what it answered is sampled again. 0: no proofs.",
    )
    tolerance: float | None = Field(
        None,
        gt=0,
        description="Largest difference between the states of engine and trainer, as a share of their size; not set: "
        "as measured for the dtype of the model and what the engine keeps in 8 bits.",
    )


class EngineConfig(Section):
    """The rollout engine: which one, how many, where, and how weights get there."""

    kind: Literal["native", "process", "vllm", "sglang"] = Field(
        "native",
        description="native: in the trainer's process, on the trainer's own weights; process: in processes of their "
        "own, with weights of their own, which is the default on a cluster and for several; vllm, sglang: servers of "
        "that kind.",
    )
    count: int = Field(
        1, ge=1, le=4096, description="Engines in processes, on this machine or the cluster, or servers to start."
    )
    server: str = Field(
        "", description="Start servers with this Python, of an environment that has vLLM or SGLang: venv/bin/python."
    )
    server_args: tuple[str, ...] = Field((), description="Further arguments of servers that are started.")
    urls: tuple[str, ...] = Field((), description="Use servers that run: http://HOST:PORT of each.")
    weights_folder: str = Field(
        "", description="Where servers read new weights; other machines need one that they see. Not set: in memory."
    )
    spot_check: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of the rollouts whose log-probs the trainer computes again, to find an engine that serves "
        "other weights than it says; not set: 0.05 with engine.urls, else 0.",
    )
    proof: ProofConfig = ProofConfig()
    sync: Literal["full", "delta"] = Field(
        "full", description="What an engine in its own process is sent: all weights, or those that changed."
    )
    memory_gb: float = Field(1.0, gt=0, description="Memory of the key-value cache.")
    max_batch: int = Field(256, ge=1, description="Most sequences decoded together.")
    prefill_tokens: int = Field(2048, ge=16, description="Most prompt tokens computed in one step.")
    cache_dtype: Literal["model", "int8"] = Field(
        "model",
        description="Keys and values in the cache: as the model computes them, or in 8 bits, with a scale for each "
        "head of a token: about half the memory, and log-probs further from the trainer's.",
    )
    weights_dtype: Literal["model", "float8"] = Field(
        "model",
        description="Weights that sample: the model's own, or copies of those for q, k, v and the MLP in 8 bits. On a "
        "GPU (Ada, Hopper or later; dense models) their products take about half the time, and log-probs are further "
        "from the trainer's. A CPU rounds them likewise, and is no faster. Held-out scores are of what samples.",
    )
    host_memory_gb: float = Field(
        0.0,
        ge=0,
        description="Memory of the host for keys and values that a full cache has no room for, or a freed one: they "
        "are copied back instead of computed again.",
    )
    keep_cache: bool = Field(
        True,
        description="false: free the cache while the trainer works; what is in flight waits in host_memory_gb, or is "
        "computed again.",
    )
    speculation: bool = Field(
        True,
        description="N-gram speculative decoding where few sequences are decoded: tokens that followed the same words "
        "earlier in a sequence are drafted, and kept where sampling agrees. Answers are the same ones, sooner.",
    )

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        complaint = next(self._complaints(), None)
        if complaint is not None:
            raise ValueError(complaint)
        return self

    @property
    def rounding(self) -> dict[str, str]:
        """What it keeps in fewer bits than the model does: `{"cache_dtype": "int8"}`. It changes answers."""
        kept = {"weights_dtype": self.weights_dtype, "cache_dtype": self.cache_dtype}
        return {name: dtype for name, dtype in kept.items() if dtype != "model"}

    @property
    def serves(self) -> bool:
        """Whether it is a server of other people."""
        return self.kind in ("vllm", "sglang")

    def _complaints(self) -> Iterator[str]:
        if self.count > 1 and self.kind == "native":
            yield (
                f"engine.count must be 1 with engine.kind = {self.kind!r}, got {self.count}: several engines cannot "
                "use the trainer's own weights"
            )
        if not self.keep_cache and self.kind != "native":
            yield (
                f"engine.keep_cache = false needs engine.kind = 'native', got {self.kind!r}: the trainer does not use "
                "the memory of another process"
            )
        if self.spot_check and self.kind == "native":
            yield f"engine.spot_check must be 0 with engine.kind = 'native', got {self.spot_check:g}: it is the trainer"
        if self.proof.share and self.kind != "process":
            yield (
                f"engine.proof.share needs engine.kind = 'process', got {self.proof.share:g} with {self.kind!r}: "
                + ("it is the trainer" if self.kind == "native" else "servers of other people send no proofs")
            )
        yield from self._about_servers() if self.serves else self._without_servers()

    def _without_servers(self) -> Iterator[str]:
        for name in ("server", "server_args", "urls", "weights_folder"):
            if value := getattr(self, name):
                yield f"engine.{name} needs engine.kind = 'vllm' or 'sglang', got {value!r} with {self.kind!r}"

    def _about_servers(self) -> Iterator[str]:
        if bool(self.server) == bool(self.urls):
            yield (
                f"engine.kind = {self.kind!r} needs either engine.server, to start servers, or engine.urls, to use "
                f"some that run, got {'both' if self.server else 'neither'}"
            )
        for url in self.urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                yield f"engine.urls must be http://HOST:PORT, got {url!r}"
            elif urlsplit(url).hostname not in _HERE and not self.weights_folder:
                yield (
                    f"engine.urls names another machine, {url!r}: engine.weights_folder must be a folder that it sees, "
                    "got none"
                )
        if len(set(self.urls)) < len(self.urls):
            yield f"engine.urls must name each server once, got {list(self.urls)}"
        for name in _OF_STARTED if self.urls else ():
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                yield f"engine.{name} is for servers that Kitae starts, got {value!r} with engine.urls"
        for name in _OF_AN_ENGINE:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                yield f"engine.{name} is not set for a server (engine.server_args can), got {value!r}"
        if not self.speculation:
            yield f"engine.speculation = false is for Kitae's own engines, got engine.kind = {self.kind!r}"
