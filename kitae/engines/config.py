"""Settings of engines and of sampling."""

from typing import Literal, Self

from pydantic import Field, model_validator

from kitae.section import Section


class SamplingConfig(Section):
    """How training rollouts are sampled."""

    temperature: float = Field(1.0, gt=0, description="Log-probs of engine and trainer are both taken at it.")
    max_tokens: int = Field(64, ge=1, description="Most tokens in one response.")
    stop: tuple[str, ...] = Field((), description="Strings that end a response.")


class EngineConfig(Section):
    """The rollout engine: which one, how many, where, and how weights get there."""

    kind: Literal["native", "process"] = Field(
        "native",
        description="native: in the trainer's process, on the trainer's own weights; process: in processes of their "
        "own, with weights of their own.",
    )
    count: int = Field(1, ge=1, le=256, description="Engines; more than 1 needs kind = process.")
    threads: int = Field(
        0,
        ge=0,
        description="Processor cores of each engine in its own process, the trainer has the others; 0: half for all.",
    )
    sync: Literal["full", "delta"] = Field(
        "full", description="What an engine in its own process is sent: all weights, or those that changed."
    )
    memory_gb: float = Field(1.0, gt=0, description="Memory of the key-value cache.")
    max_batch: int = Field(256, ge=1, description="Most sequences decoded together.")
    prefill_tokens: int = Field(2048, ge=16, description="Most prompt tokens computed in one step.")
    page_size: int = Field(16, ge=1, le=256, description="Tokens in one page of the cache.")
    keep_cache: bool = Field(
        True, description="false: free the cache while the trainer works; what is in flight is computed again."
    )
    fast: bool = Field(True, description="Use compiled kernels where they can be built; false: plain torch.")

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.count > 1 and self.kind == "native":
            raise ValueError(
                f"engine.count must be 1 with engine.kind = {self.kind!r}, got {self.count}: several engines cannot "
                "use the trainer's own weights"
            )
        if not self.keep_cache and self.kind != "native":
            raise ValueError(
                f"engine.keep_cache = false needs engine.kind = 'native', got {self.kind!r}: the trainer does not use "
                "the memory of another process"
            )
        return self
