"""A teacher beside a student: its log-probs, the gradient that comes of them, and vocabularies that are padded."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from short_settings import algorithm_with
from torch import Tensor
from trainer_workers import column_of, forward_backward, make_worker
from transformers import AutoModelForCausalLM

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.group_stages import GroupStages, replace_samples
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.models.tiny import make_tiny
from kitae.offline.config import JSD
from kitae.trainer.base import Column
from kitae.trainer.config import TrainingConfig
from kitae.trainer.local_trainer import LocalTrainer
from kitae.trainer.teacher.frozen_teacher import UNKNOWN, Teacher
from kitae.trainer.training_worker import Worker
from kitae.types import Group, Message, Prompt, Rollout, Sample, Score, Segment

PROMPT = (5, 80, 33, 7)
TRAINING = TrainingConfig(token_budget=40)


def load(folder: Path, **settings: Any) -> Policy:
    return load_policy(ModelConfig(path=str(folder), device="cpu", dtype="float32", plain=True, **settings))


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another architecture, size and seed than the student's."""
    return make_tiny(tmp_path_factory.mktemp("teacher") / "qwen3", "qwen3", seed=5, hidden=32)


@pytest.fixture(scope="module")
def student_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("student") / "llama", "llama", seed=1)


def padded(folder: Path, target: Path, rows: int) -> Path:
    """The same model with a head of more rows, which are not zero."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[259:] = 0.3
    model.save_pretrained(target)
    for file in folder.glob("tokenizer*"):
        (target / file.name).write_bytes(file.read_bytes())
    return target


def teacher_of(folder: Path, rows: int = 259, temperature: float = 1.0) -> Teacher:
    return Teacher(load(folder), TRAINING, temperature, rows)


def make_sample(tokens: list[int], index: int = 0) -> Sample:
    sequence = [*PROMPT, *tokens]
    mask_T = np.arange(len(sequence)) >= len(PROMPT)
    zeros = np.zeros(len(sequence), dtype=np.float32)
    columns = dict.fromkeys(("logp_mu", "version", "score", "advantage"), zeros)
    weight_T = np.where(mask_T, np.float32(0.1 * (index + 1)), np.float32(0))
    return Sample(0, index, np.array(sequence), len(PROMPT), mask_T, weight_T, columns)


SAMPLES = [make_sample([9, 40, 41, 200]), make_sample([17], 1), make_sample(list(range(100, 116)), 2)]


def plain_logits(model: Any, sample: Sample) -> Tensor:
    """`[N, V]` at the loss tokens, by an ordinary forward pass."""
    logits: Tensor = model(torch.tensor(sample.tokens_T)[None]).logits[0].float()
    return logits[torch.tensor(np.flatnonzero(sample.mask_T) - 1)]


def gradient_of(policy: Policy) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


# Log-probs.


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_scores_the_students_tokens_at_the_temperature_of_the_rollouts(
    temperature: float, student_folder: Path, teacher_folder: Path
) -> None:
    teacher = teacher_of(teacher_folder, temperature=temperature)
    worker = make_worker(load(student_folder), TRAINING, temperature=temperature, teacher=teacher)
    plain = AutoModelForCausalLM.from_pretrained(teacher_folder)
    for sample, found in zip(SAMPLES, column_of(worker, SAMPLES, Column.TEACHER), strict=True):
        logp_NV = (plain_logits(plain, sample) / temperature).log_softmax(-1)
        targets = torch.tensor(sample.tokens_T[sample.mask_T])
        expected = logp_NV.gather(1, targets[:, None])[:, 0]
        assert found[sample.mask_T].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
        assert (found[~sample.mask_T] == 0).all()


def test_teacher_reference_and_student_are_three_models(student_folder: Path, teacher_folder: Path) -> None:
    worker = make_worker(load(student_folder), TRAINING, reference=True, teacher=teacher_of(teacher_folder))
    columns = (Column.OLD, Column.REFERENCE, Column.TEACHER)
    old, reference, taught = ([c.copy() for c in column_of(worker, SAMPLES, column)] for column in columns)
    with torch.no_grad():
        for parameter in worker.policy.model.parameters():
            parameter.mul_(1.1)
    moved, same, still = (column_of(worker, SAMPLES, column) for column in columns)
    for i in range(len(SAMPLES)):
        assert old[i].tolist() == pytest.approx(reference[i].tolist(), abs=1e-5)
        assert not np.allclose(old[i], taught[i], atol=0.1)
        assert not np.allclose(moved[i], old[i], atol=1e-2)
        assert same[i].tolist() == reference[i].tolist()
        assert still[i].tolist() == taught[i].tolist()


# The gradient of the reverse KL.


def next_token(model: Any) -> Tensor:
    """Log-probs of the first token of a response."""
    with torch.no_grad():
        found: Tensor = model(torch.tensor(PROMPT)[None]).logits[0, -1].double().log_softmax(-1)
    return found


def every_token(model: Any) -> tuple[Rollout, ...]:
    """All responses of one token."""
    return tuple(
        Rollout.of(0, v, PROMPT, (Segment("model", (v,), (logp,), (0,)),), "stop", "", Score(0.0))
        for v, logp in enumerate(next_token(model).tolist())
    )


def test_its_expected_policy_gradient_is_that_of_the_reverse_kl(student_folder: Path, teacher_folder: Path) -> None:
    """The expectation over all responses of one token, against finite differences of the KL itself."""
    student, algorithm = load(student_folder), AlgorithmConfig(preset="distil")
    plain, teacher = (AutoModelForCausalLM.from_pretrained(folder) for folder in (student_folder, teacher_folder))
    worker = make_worker(student, TRAINING, algorithm, teacher=teacher_of(teacher_folder))
    stages = GroupStages(algorithm, 8)
    candidates = stages.candidates([Group(0, Prompt("p", (Message("user", "?"),), ""), every_token(plain))])
    samples = [s for c in candidates for s in c.samples]
    annotated = asyncio.run(LocalTrainer(worker).annotate(samples, [Column.OLD, Column.TEACHER]))
    trained = stages.weighted(stages.advantages(replace_samples(candidates, annotated)))
    expected = tuple(replace(s, weight_T=s.spread(np.exp(s.loss("logp_old")))) for s in trained)
    totals = forward_backward(worker, expected).numbers()
    gradient = gradient_of(student)
    torch.manual_seed(0)
    direction = {name: torch.randn_like(g) for name, g in gradient.items()}
    slope = sum(float((g * direction[name]).sum()) for name, g in gradient.items())
    step, values = 1e-3, []
    for shift in (step, -2 * step):
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.add_(shift * direction[name])
        logq_V, logp_V = next_token(plain), next_token(teacher)
        values.append(float((logq_V.exp() * (logq_V - logp_V)).sum()))
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=2e-2)
    assert abs(slope) > 0.1
    assert totals["clip_high"] == totals["clip_low"] == 0


# The divergence over the vocabulary.


def plain_divergence(logq_NV: Tensor, logp_NV: Tensor, beta: float) -> Tensor:
    """By its definition."""
    q, p = logq_NV.exp(), logp_NV.exp()
    if beta in (0, 1):
        return (p * (logp_NV - logq_NV)).sum(-1) if beta == 0 else (q * (logq_NV - logp_NV)).sum(-1)
    m = (beta * p + (1 - beta) * q).log()
    return beta * (p * (logp_NV - m)).sum(-1) + (1 - beta) * (q * (logq_NV - m)).sum(-1)


@pytest.mark.parametrize(("beta", "temperature"), [(0.5, 1.0), (0.1, 2.0), (0.0, 1.0), (1.0, 0.7)])
def test_the_divergence_of_a_step_is_that_of_all_logits(
    beta: float, temperature: float, student_folder: Path, teacher_folder: Path
) -> None:
    """Loss and gradient; its temperature is its own, whatever that of the rollouts."""
    student = load(student_folder)
    algorithm = algorithm_with(preset="gkd", correction="none")
    worker = make_worker(
        student, TRAINING, algorithm, temperature=1.3, teacher=teacher_of(teacher_folder),
        divergence=JSD(beta, temperature),
    )  # fmt: skip
    totals = forward_backward(worker, SAMPLES).numbers()
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder) for folder in (student_folder, teacher_folder))
    loss, every = torch.zeros(()), []
    for sample in SAMPLES:
        logq_NV, logp_NV = ((plain_logits(m, sample) / temperature).log_softmax(-1) for m in (ours, theirs))
        divergence_N = plain_divergence(logq_NV, logp_NV.detach(), beta)
        loss = loss + (divergence_N * torch.tensor(sample.weight_T[sample.mask_T])).sum()
        every.append(divergence_N.detach())
    loss.backward()  # type: ignore[no-untyped-call]
    assert totals["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert totals["teacher_divergence"] == pytest.approx(torch.cat(every).mean().item(), rel=1e-4)
    found = gradient_of(student)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, rtol=2e-3, atol=2e-5)


def test_adapters_of_a_student_learn_from_a_teacher_that_has_none(student_folder: Path, teacher_folder: Path) -> None:
    student = load(student_folder, lora_rank=4)
    teacher = teacher_of(teacher_folder)
    worker = make_worker(
        student, TRAINING, AlgorithmConfig(preset="gkd"), teacher=teacher, divergence=JSD(0.5, 1.0)
    )  # fmt: skip
    forward_backward(worker, SAMPLES)
    found = gradient_of(student)
    assert found and all("lora" in name for name in found)
    assert any(g.abs().max() > 0 for g in found.values())
    assert not gradient_of(teacher.policy)


# Vocabularies of different sizes.


def test_rows_of_padding_of_the_teacher_do_not_count(
    tmp_path: Path, student_folder: Path, teacher_folder: Path
) -> None:
    larger = padded(teacher_folder, tmp_path / "larger", 264)
    plain = make_worker(load(student_folder), TRAINING, teacher=teacher_of(teacher_folder))
    other = make_worker(load(student_folder), TRAINING, teacher=teacher_of(larger))
    expected, found = (column_of(worker, SAMPLES, Column.TEACHER) for worker in (plain, other))
    for a, b in zip(expected, found, strict=True):
        assert a.tolist() == pytest.approx(b.tolist(), abs=1e-5)
    whole = make_worker(load(student_folder), TRAINING, teacher=teacher_of(larger, rows=264))
    assert not np.allclose(column_of(whole, SAMPLES, Column.TEACHER)[2], expected[2], atol=1e-3), "padding has weight"


def taught(student: Policy, folder: Path) -> Worker:
    """By a divergence."""
    algorithm = algorithm_with(preset="gkd", correction="none")
    return make_worker(student, TRAINING, algorithm, teacher=teacher_of(folder), divergence=JSD(0.5, 1.0))


def test_a_student_with_more_padding_learns_what_it_would_without(
    tmp_path: Path, student_folder: Path, teacher_folder: Path
) -> None:
    larger = padded(student_folder, tmp_path / "larger", 262)
    gradients, losses = [], []
    for folder in (student_folder, larger):
        worker = taught(load(folder), teacher_folder)
        losses.append(forward_backward(worker, SAMPLES).numbers()["loss"])
        gradients.append(gradient_of(worker.policy))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name][: len(expected)], expected, rtol=1e-3, atol=1e-6)


def test_a_token_that_the_teacher_lacks_is_very_unlikely_and_breaks_nothing(
    tmp_path: Path, student_folder: Path, teacher_folder: Path
) -> None:
    student = load(padded(student_folder, tmp_path / "larger", 262))
    worker = make_worker(student, TRAINING, teacher=teacher_of(teacher_folder))
    (found,) = column_of(worker, [make_sample([9, 261, 40])], Column.TEACHER)
    assert found[len(PROMPT) + 1] == UNKNOWN
    assert np.isfinite(found).all() and (found[[len(PROMPT), len(PROMPT) + 2]] > UNKNOWN).all()
