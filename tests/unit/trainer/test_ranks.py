"""Two real ranks and one process agree: in gradient, norm, metrics and weights, and on whether to update at all.

Each rank has the rows of every second place. Either all of them hold whole models, and a gradient that has been added
up is shared out tensor by tensor; or torch shards the models.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from test_gradient import make_samples
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from workers import make_worker, weighted

from kitae.algorithms.config import AlgorithmConfig
from kitae.data.packing import Row
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.observe.meter import Kind, Totals
from kitae.trainer.base import Conditions, Role
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import pack_rows
from kitae.trainer.ranks import Alone, Distributed, Ranks
from kitae.types import FloatArray, Sample, SampleKey

# Fused layers return views, which nothing writes to.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")

TRAINING = TrainingConfig(lr=1e-2, token_budget=30)
SHAPES = [(0, 5, 3), (0, 5, 9), (1, 12, 1), (1, 12, 7), (2, 30, 20), (3, 1, 4), (3, 1, 9), (4, 3, 20)]
GRPO: dict[str, Any] = {"preset": "grpo"}
PPO: dict[str, Any] = {"preset": "ppo", "kl_coef": 0.0, "critic_lr": 1e-2}
BOTH = (Role.CRITIC, Role.POLICY)
GATE = """
def gate(ratio_N, tokens):  # where an advantage is above 50, the loss is no number, but its gradient is
    loss_N = -tokens.advantage_N * ratio_N
    return loss_N + loss_N.detach().where(tokens.advantage_N < 50, float("nan"))
"""


@dataclass(frozen=True)
class Case:
    """Two updates on these rows."""

    choices: dict[str, Any]
    rows: Sequence[Row]
    roles: tuple[Role, ...] = (Role.POLICY,)
    sharded: bool = False
    fuse: bool = True


@dataclass(frozen=True)
class Result:
    """What rank 0 saw: the gradient of the first update, whole; the numbers of both; all weights after them.

    tokens: what the first update says of single tokens of observed samples.
    """

    gradient: list[Tensor]
    numbers: list[dict[str, float]]
    weights: list[Tensor]
    tokens: Mapping[SampleKey, Mapping[str, FloatArray]]


def train(folder: str, case: Case) -> Result:
    """With the rows of this rank, or all of them where there is one process."""
    ranks: Ranks = Distributed() if dist.is_initialized() else Alone()
    algorithm = AlgorithmConfig.model_validate(case.choices)
    policy = load(folder, case.fuse)
    critic = ScalarModel(load(folder, case.fuse)) if algorithm.advantage == "gae" else None
    if case.sharded and ranks.size > 1:
        shard(policy, policy.base.get_decoder().layers)
        if critic is not None:
            shard(critic, critic.policy.base.get_decoder().layers)
    worker = make_worker(policy, TRAINING, algorithm, critic=critic, ranks=ranks)
    masters = [m for role in case.roles for m in worker.trained[role].optimizer.masters]
    gradients, numbers, tokens = [], [], []
    for version in (1, 2):
        passed = worker.forward_backward(case.rows[ranks.rank :: ranks.size], Conditions(version), case.roles)
        tokens.append(passed.tokens)
        gradients.append([shared_out(m, i, ranks) for i, m in enumerate(masters)])
        numbers.append((passed + worker.optim_step()).numbers())
        for i, m in enumerate(masters):
            if ranks.size > 1 and not isinstance(m, DTensor):
                dist.broadcast(m.detach(), i % ranks.size)
    return Result(gradients[0], numbers, [whole(m.detach()) for m in masters], tokens[0])


def load(folder: str, fuse: bool) -> Policy:
    return load_policy(ModelConfig(path=folder, dtype="float32", device="cpu", fuse=fuse))


def shard(root: torch.nn.Module, layers: Iterable[torch.nn.Module]) -> None:
    """Every layer and the root; gradients are added up, not averaged."""
    for module in (*layers, root):
        sharded = fully_shard(module)
        assert isinstance(sharded, FSDPModule)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def shared_out(master: Tensor, place: int, ranks: Ranks) -> Tensor:
    """The whole gradient of a tensor, of which then one rank has all or every rank a part."""
    assert master.grad is not None
    if ranks.size > 1 and not isinstance(master.grad, DTensor):
        dist.all_reduce(master.grad)
    found = whole(master.grad)
    if place % ranks.size != ranks.rank and not isinstance(master.grad, DTensor):
        master.grad = None
    return found


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def rows_of(samples: Sequence[Sample], choices: dict[str, Any]) -> list[Row]:
    """An even number of them, so that every rank has as many. Every second sample is observed."""
    samples = weighted(samples, AlgorithmConfig.model_validate(choices))
    observed = {s.key for s in samples[::2]}
    return pack_rows(samples, TRAINING, torch.device("cpu"), ranks=2, observed=observed)[1]


def one_sided(rows: Sequence[Row]) -> list[Row]:
    """All of them for rank 0; rank 1 has as many empty ones."""
    return [each for row in rows if row.loss_tokens for each in (row, Row.empty())]


def with_values(samples: Sequence[Sample]) -> list[Sample]:
    weight = 1 / sum(s.loss_tokens for s in samples)
    columns = [{"value": 0.0, "return": 0.2 * s.index - 0.5, "value_weight": weight} for s in samples]
    return [
        s.with_columns(**{name: s.spread(np.float32(x)) for name, x in own.items()})
        for s, own in zip(samples, columns, strict=True)
    ]


def check(case: Case, found: Result, folder: str) -> None:
    alone = train(folder, replace(case, rows=[row for row in case.rows if row.loss_tokens]))
    assert max(g.abs().max() for g in alone.gradient) > 1e-2
    for a, b in zip(found.gradient, alone.gradient, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * max(1.0, b.abs().max().item()))
    for mine, expected in zip(found.numbers, alone.numbers, strict=True):
        assert mine == pytest.approx(expected, rel=2e-4, abs=1e-6, nan_ok=True)
    for a, b in zip(found.weights, alone.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)  # Adam divides what is left of small gradients by itself


def agree() -> tuple[list[bool], Totals, float]:
    """What ranks tell each other, without any model."""
    ranks = Distributed()
    flags = [ranks.every(True), ranks.every(ranks.rank == 0), ranks.every(False)]
    mine = Totals.of(Kind.COUNT, seen=1 + ranks.rank) + Totals.of(Kind.MAX, top=-ranks.rank)
    together = ranks.together(mine if ranks.rank else mine + Totals.of(Kind.COUNT, first=1))
    norm = ranks.norm([torch.tensor([3.0])] if ranks.rank else [torch.zeros(2), torch.tensor([0.0, 4.0])])
    return flags, together, norm.item()


def work(folder: str, cases: list[Case]) -> tuple[tuple[list[bool], Totals, float], list[Result]]:
    return agree(), [train(folder, case) for case in cases]


@dataclass(frozen=True)
class Found:
    """What two processes did, which take long to start and so do everything at once."""

    folder: str
    agreed: tuple[list[bool], Totals, float]
    results: list[tuple[Case, Result]]


@pytest.fixture(scope="module")
def found(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Found:
    place = tmp_path_factory.mktemp("ranks")
    (place / "own.py").write_text(GATE)
    own = {"preset": "grpo", "gate": f"{place / 'own.py'}:gate"}
    *others, last = make_samples(SHAPES)
    spoilt = [*others, last.with_columns(advantage=last.spread(np.float32(60)))]
    plain, values = make_samples(SHAPES, gaps=True), rows_of(with_values(make_samples(SHAPES)), PPO)
    cases = [
        Case(GRPO, rows_of(plain, GRPO)),
        Case({"preset": "opsm"}, one_sided(rows_of(plain, GRPO))),
        Case(PPO, values, BOTH),
        Case(PPO, one_sided(values), (Role.CRITIC,)),
        Case(own, rows_of(spoilt, own)),
        Case(GRPO, rows_of(plain, GRPO), sharded=True, fuse=False),
        Case(PPO, values, BOTH, sharded=True),
        Case(PPO, one_sided(values), BOTH, sharded=True),
    ]
    assert len(values) >= 4, "more than one row for each rank"
    folder = str(tiny_folder("llama"))
    agreed, results = on_ranks(place, work, folder, cases)
    return Found(folder, agreed, list(zip(cases, results, strict=True)))


def test_what_ranks_tell_each_other(found: Found) -> None:
    flags, together, norm = found.agreed
    assert flags == [True, False, False]
    assert together.numbers() == {"seen": 3, "top": 0, "first": 1}
    assert norm == 5


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_are_one_process(found: Found, sharded: bool) -> None:
    """Also where one of them has nothing to do."""
    for case, result in found.results:
        if case.sharded == sharded:
            check(case, result, found.folder)


def test_ranks_say_of_single_tokens_what_one_process_says(found: Found) -> None:
    for case, result in found.results:
        alone = train(found.folder, replace(case, rows=[row for row in case.rows if row.loss_tokens]))
        wanted = {sample.key for row in case.rows for sample in row.observed} if Role.POLICY in case.roles else set()
        assert result.tokens.keys() == alone.tokens.keys() == wanted
        for key, columns in alone.tokens.items():
            for name, values_N in columns.items():
                np.testing.assert_allclose(result.tokens[key][name], values_N, rtol=1e-3, atol=1e-5)


def test_a_loss_that_is_no_number_on_one_rank_stops_all(found: Found) -> None:
    names = {Role.POLICY: "skipped_updates", Role.CRITIC: "critic_skipped_updates"}
    for case, result in found.results:
        spoilt = "gate" in case.choices
        skipped = [[n[names[role]] for n in result.numbers] for role in case.roles]
        assert skipped == [[float(spoilt)] * 2] * len(case.roles)
        start = train(found.folder, replace(case, rows=[Row.empty()]))
        moved = any(not torch.equal(a, b) for a, b in zip(result.weights, start.weights, strict=True))
        assert moved == (not spoilt)
