"""Settings of the trainer."""

from typing import Literal

from pydantic import Field

from kitae.section import Section


class LearningConfig(Section):
    """How weights are updated, whatever they learn from."""

    steps: int = Field(100, ge=1, description="Steps to train: one batch each.")
    minutes: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Minutes that the steps may take, in all attempts together: the run ends with the step that "
        "reaches them, as it would after its last one; 0: no limit. Loading, the first and the last evaluation come "
        "on top.",
    )
    lr: float = Field(1e-5, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="What follows the warm-up.")
    betas: tuple[float, float] = Field((0.9, 0.99), description="AdamW momenta.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    moments: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Numbers that AdamW keeps of each weight; in bfloat16, rounded by chance, half the memory.",
    )
    clip_norm: float = Field(1.0, gt=0, description="Largest gradient norm.")
    token_budget: int = Field(
        0,
        ge=0,
        description="Most tokens in a packed micro-batch; 0: 8,192 on a GPU, on a CPU 1,024, in bfloat16 2,048. "
        "Logits of half of it are held at a time.",
    )
    checkpoint_activations: bool = Field(False, description="Recompute activations in the backward pass: less memory.")

    def ended_at(self, step: int) -> str:
        """`"15 of 15 steps"`, or `"46 of 400 steps, as many as training.minutes = 3.5 allowed"`."""
        early = f", as many as training.minutes = {self.minutes:g} allowed" if step < self.steps else ""
        return f"{step} of {self.steps} steps{early}"

    def beyond(self, step: int) -> str:
        """The setting with which a run that ended at this step is trained further: `"training.steps=30"`."""
        return f"training.minutes={2 * self.minutes:g}" if step < self.steps else f"training.steps={2 * step}"


class TrainingConfig(LearningConfig):
    """The optimizer and the size of a step."""

    steps: int = Field(100, ge=1, description="Policy versions to train: one batch of rollouts each.")
    prompts_per_step: int = Field(8, ge=1, description="Groups in a batch.")
    group_size: int = Field(8, ge=1, description="Samples of each prompt.")
    minibatches: int = Field(1, ge=1, description="Optimizer steps a batch is cut into, by whole groups.")
    epochs: int = Field(1, ge=1, description="Passes over each batch.")
