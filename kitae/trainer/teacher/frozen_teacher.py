"""A teacher in the trainer's process: a frozen model that scores the student's tokens.

It has modules of its own, and is not the reference, which is always an earlier state of the student. Checkpoints leave
it out, as its folder has all of it. Where the vocabularies of student and teacher are padded to different sizes, only
the common rows count (`kitae.models.vocabulary`).
"""

from dataclasses import replace

import torch
from torch import Tensor

from kitae.algorithms.distillation import generalised_jsd
from kitae.errors import ModelError
from kitae.models.config import WHOLE, ModelConfig
from kitae.models.load import check_model, load_policy, load_tokenizer, pick_device
from kitae.models.logprobs import Head
from kitae.models.policy import Policy
from kitae.models.vocabulary import common_rows
from kitae.observe.meter import Meter
from kitae.trainer.base import Conditions
from kitae.trainer.config import LearningConfig
from kitae.trainer.forward import MicroBatch, attention, logit_chunk
from kitae.trainer.objectives import OfStates, PolicyScorer

UNKNOWN = -30.0
"""The log-prob of a token that the teacher has no row for: padding, which a student practically never samples."""
_CHUNK = 1024  # rows of logits at a time; a divergence holds several copies of them


class Teacher(PolicyScorer):
    """`Teacher(policy, training, temperature=1.0, rows=151936)`; rows: how many of its logits the student has too."""

    def __init__(self, policy: Policy, config: LearningConfig, temperature: float, rows: int) -> None:
        super().__init__(policy, config, temperature)
        policy.requires_grad_(False)
        self._readable = len(policy.base.get_input_embeddings().weight)
        policy.rows = rows
        self.rows = rows

    def outputs(self, micro: MicroBatch) -> Tensor:
        known_N = micro.target_N < self.rows
        target_N = micro.target_N.where(known_N, 0)
        logp_N = self.score(replace(self._read(micro), target_N=target_N))[0]
        return logp_N.masked_fill(~known_N, UNKNOWN)

    def states(self, micro: MicroBatch) -> Tensor:
        """The hidden states at the positions that predict the loss tokens, without gradients."""
        micro = self._read(micro)
        with torch.no_grad():
            return self.policy.hidden(micro.tokens_T, micro.positions_T, attention(self.policy, micro))[micro.source_N]

    def _read(self, micro: MicroBatch) -> MicroBatch:
        return replace(micro, tokens_T=micro.tokens_T.clamp(max=self._readable - 1))


class TeacherDivergence:
    """The generalised Jensen–Shannon divergence from a teacher: a `Divergence` of `kitae.trainer.objectives`."""

    def __init__(self, teacher: Teacher, config: LearningConfig, *, beta: float, temperature: float) -> None:
        self._teacher = teacher
        self._chunk = min(_CHUNK, logit_chunk(config, teacher.policy.device))
        self._beta = beta
        self._temperature = temperature

    def __call__(self, micro: MicroBatch) -> OfStates:
        theirs_NH, head = self._teacher.states(micro), self._teacher.policy.output

        def divergence(ours: Head, ours_NH: Tensor) -> Tensor:
            return generalised_jsd(
                ours.cut(self._teacher.rows),
                ours_NH,
                head,
                theirs_NH,
                beta=self._beta,
                temperature=self._temperature,
                chunk=self._chunk,
            )

        return divergence


class Distilled(PolicyScorer):
    """Σ weight · divergence, without any column. Its outputs are divergences."""

    def __init__(self, policy: Policy, config: LearningConfig, divergence: TeacherDivergence) -> None:
        super().__init__(policy, config, temperature=1.0)
        self._divergence = divergence

    def outputs(self, micro: MicroBatch) -> Tensor:
        return self.score(micro, divergence=self._divergence)[2]

    def loss(self, micro: MicroBatch, conditions: Conditions, meter: Meter) -> Tensor:
        logp_N, entropy_N, divergence_N = self.score(micro, divergence=self._divergence)
        loss = (divergence_N * micro.weight_N).sum()
        meter.total("loss", loss.detach())
        meter.part("nll", -logp_N.detach().sum(), len(logp_N))
        meter.part("entropy", entropy_N.detach().sum(), len(entropy_N))
        return loss


def load_teacher(
    model: ModelConfig, path: str, student: Policy, training: LearningConfig, temperature: float
) -> Teacher:
    """A teacher on the student's device, in its dtype, without adapters. model: the student's settings."""
    policy = load_policy(beside(model, path))
    return Teacher(policy, training, temperature, rows_of(model, path, student))


def rows_of(model: ModelConfig, path: str, student: Policy) -> int:
    """How many of the teacher's logits the student has too; model: the student's settings."""
    teacher = beside(model, path)
    tokenizer, rows = load_tokenizer(teacher)[0], _rows(teacher)
    return common_rows(student.tokenizer, student.vocabulary, tokenizer, rows, (model.path, path))


def check_teacher(model: ModelConfig, path: str, device: str = "") -> None:
    """Check everything about a teacher that needs no weights; downloads the models' files if need be."""
    teacher = beside(model, path, device)
    try:
        check_model(teacher)
    except ModelError as problem:
        raise ModelError(f"method.teacher: {problem}") from None
    try:
        pick_device(teacher.device)
    except ModelError as problem:
        raise ModelError(f"method.teacher.device: {problem}" if device else str(problem)) from None
    check_model(model)
    tokenizers = load_tokenizer(model)[0], load_tokenizer(teacher)[0]
    common_rows(tokenizers[0], _rows(model), tokenizers[1], _rows(teacher), (model.path, path))


def beside(model: ModelConfig, path: str, device: str = "") -> ModelConfig:
    """A teacher's settings: the student's, without adapters; device: the teacher's own, if it has one."""
    return model.model_copy(
        update={"path": path, **WHOLE, "exact": False, "device": device or model.device},
    )


def _rows(model: ModelConfig) -> int:
    from transformers import AutoConfig

    return int(
        AutoConfig.from_pretrained(check_model(model), trust_remote_code=model.trust_remote_code)
        .get_text_config()
        .vocab_size
    )
