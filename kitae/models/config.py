"""Settings of the model."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from kitae.models.adapter_folder import with_adapter
from kitae.section import Section

WHOLE: dict[str, Any] = {"adapter": "", "lora_rank": 0, "lora_base": "model"}
"""Settings of a model that has no adapters."""


class ModelConfig(Section):
    """The policy."""

    path: str = Field(
        "smollm2-135m",
        min_length=1,
        description="A folder, a hub id, or a short name: smollm2-135m (real), tiny or tiny-seeing (made on the spot, "
        "for tests).",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="auto: bfloat16 where the hardware can compute in it, and float32 where it cannot."
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1 …")
    plain: bool = Field(
        False,
        description="For comparisons: sample and train with the modules of transformers and plain torch, without "
        "Kitae's kernels, and compute a prompt again for each of its samples in training.",
    )
    exact: bool = Field(
        False,
        description="Make every log-prob the same to the last bit in the engine and the trainer, in any batch; slower.",
    )
    trust_remote_code: bool = Field(
        False, description="Run the Python code that comes with a model whose architecture transformers does not have."
    )
    lora_rank: int = Field(0, ge=0, description="0 trains all weights; more trains LoRA adapters of this rank.")
    lora_alpha: float = Field(32.0, gt=0, description="LoRA scale numerator.")
    lora_targets: str = Field("all-linear", description="all-linear, or names of modules separated by commas.")
    lora_base: Literal["model", "nf4"] = Field(
        "model", description="nf4: keep what adapters are added to in 4 bits (QLoRA): less memory, and slower."
    )
    adapter: str = Field(
        "",
        description="A folder of peft whose adapters training goes on from; it says rank, alpha and targets. "
        "model.path may name it too, if it says its base.",
    )
    train_vision: bool = Field(
        False,
        description="Train the tower of a model that sees, and what joins it to the decoder, too; not with LoRA.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_adapter(cls, values: Any) -> Any:
        return with_adapter(values)

    def at(self, path: str) -> Self:
        """The same settings for another model: a whole one, or adapters of a folder."""
        own = {key: value for key, value in self.model_dump().items() if not key.startswith(("lora_", "adapter"))}
        return type(self)(**{**own, "path": path})

    @model_validator(mode="after")
    def _tower(self) -> Self:
        if self.train_vision and self.lora_rank:
            raise ValueError(
                f"model.train_vision trains whole weights, so model.lora_rank must be 0, got {self.lora_rank}"
            )
        return self
