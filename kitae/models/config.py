"""Settings of the model."""

from typing import Literal

from pydantic import Field

from kitae.section import Section


class ModelConfig(Section):
    """The policy."""

    path: str = Field(
        "smollm2-135m",
        min_length=1,
        description="A folder, a hub id, or a short name: smollm2-135m (real), tiny (made on the spot, for tests).",
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
