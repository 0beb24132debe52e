"""Settings of the kinds of run, and of those that train on a file of examples."""

from typing import Literal

from pydantic import Field

from kitae.section import Section
from kitae.trainer.config import LearningConfig


class MethodConfig(Section):
    """What kind of run this is; each kind has settings of its own."""

    kind: str


class RLMethod(MethodConfig):
    """Reinforcement learning with verifiable rewards: the kind of run that a recipe is unless it says otherwise."""

    kind: Literal["rl"] = Field("rl", description="The kind of run.")


class SFTMethod(MethodConfig):
    """Supervised fine-tuning: the likelihood of demonstrations."""

    kind: Literal["sft"] = Field("sft", description="The kind of run.")
    loss: Literal["likelihood", "dft"] = Field(
        "likelihood",
        description="dft weighs each token by its probability, so that what the model finds unlikely pulls less.",
    )


class StageTraining(LearningConfig):
    """The optimizer, and how much of the data it sees."""

    steps: int = Field(0, ge=0, description="Steps to train: one batch each; 0: as many as `epochs` take.")
    epochs: float = Field(1.0, gt=0, description="Passes over the examples, where `steps` is 0.")
    batch: int = Field(32, ge=1, description="Examples in a batch.")


class StageEval(Section):
    """Evaluation on held-out examples before, during and after training."""

    examples: int = Field(64, ge=0, description="Held-out examples; 0: no evaluation.")
    every: int = Field(0, ge=0, description="Steps between evaluations; 0: only before and after.")
