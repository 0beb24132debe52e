"""Two real ranks and one process agree: in gradient, norm, metrics and weights, and on whether to update at all.

Rows are uneven, clipping is active, and in some cases a rank has nothing to do.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import on_ranks
from safetensors.torch import load_file
from sharded import BOTH, CPU, GRPO, PPO, SHAPES, Case, Crew, Result, check, one_sided, rows_of, train, with_values
from test_gradient import make_samples
from torch import Tensor

from kitae.models.load import has_bfloat16
from kitae.models.written_folder import export_policy
from kitae.observe.meter import Kind, Totals
from kitae.trainer.base import Role
from kitae.trainer.parallel.mesh import Mesh, Parallel

GATE = """
def gate(ratio_N, tokens):  # where an advantage is above 50, the loss is no number, but its gradient is
    loss_N = -tokens.advantage_N * ratio_N
    return loss_N + loss_N.detach().where(tokens.advantage_N < 50, float("nan"))
"""
TWO = Parallel(ranks=2)
KL = {"preset": "grpo", "kl_coef": 0.1, "reference": "frozen"}
EMA = {**KL, "reference": "ema", "reference_every": 1, "reference_mix": 0.25}


def agree() -> tuple[list[bool], Totals, float]:
    """What ranks tell each other, without any model."""
    ranks = Mesh(TWO, CPU).ranks
    flags = [ranks.every(True), ranks.every(ranks.rank == 0), ranks.every(False)]
    mine = Totals.of(Kind.COUNT, seen=1 + ranks.rank) + Totals.of(Kind.MAX, top=-ranks.rank)
    together = ranks.together(mine if ranks.rank else mine + Totals.of(Kind.COUNT, first=1))
    both = torch.zeros(2)  # as a parameter says that all ranks hold the same
    return flags, together, ranks.norm([(torch.tensor([3.0, 4.0]), both)]).item()


def as_peers() -> Totals:
    """Ranks that compute the same rows: their counts count once."""
    ranks = Mesh(Parallel(ranks=2, tensor=2), CPU).ranks
    return ranks.together(Totals.of(Kind.COUNT, seen=3) + Totals.of(Kind.MAX, top=ranks.rank))


@dataclass(frozen=True)
class Kept:
    """A run that is saved after two updates, and trained on meanwhile: weights then, and what the third one says."""

    case: Case
    weights: list[Tensor]
    third: dict[str, float]


def keep(folder: str, case: Case, place: Path) -> Kept:
    crew = Crew.of(folder, case)
    crew.update(1)
    crew.update(2)
    weights = crew.weights()
    wait = crew.worker.begin_save(place)
    third = crew.update(3)
    wait()
    export_policy(crew.worker.policy, place / "model")
    return Kept(case, weights, third)


def work(folder: str, cases: list[Case], kept: list[tuple[Case, Path]]) -> tuple[object, ...]:
    return agree(), as_peers(), [train(folder, case) for case in cases], [keep(folder, *each) for each in kept]


@dataclass(frozen=True)
class Found:
    """What two processes did, which take long to start and so do everything at once."""

    folder: str
    agreed: tuple[list[bool], Totals, float]
    of_peers: Totals
    results: list[tuple[Case, Result]]
    kept: list[tuple[Kept, Path]]


@pytest.fixture(scope="module")
def found(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Found:
    place = tmp_path_factory.mktemp("ranks")
    (place / "own.py").write_text(GATE)
    own = {"preset": "grpo", "gate": f"{place / 'own.py'}:gate"}
    *others, last = make_samples(SHAPES)
    spoilt = [*others, last.with_columns(advantage=last.spread(np.float32(60)))]
    samples = make_samples(SHAPES, gaps=True)
    plain, values = rows_of(samples, GRPO), rows_of(with_values(make_samples(SHAPES)), PPO)
    referred = rows_of([s.with_columns(logp_ref=s.columns["logp_mu"]) for s in with_values(samples)], KL)
    tensor, sequence = Parallel(ranks=2, tensor=2), Parallel(ranks=2, sequence=2)
    bf16 = {"dtype": "bfloat16" if has_bfloat16() else "float32"}
    cases = [
        Case(plain, TWO, training={"checkpoint_activations": True}),
        Case(one_sided(plain), TWO, {"preset": "opsm"}),
        Case(values, TWO, PPO, BOTH),
        Case(one_sided(values), TWO, PPO, (Role.CRITIC,)),
        Case(rows_of(spoilt, own), TWO, own),
        Case(referred, TWO, model={"lora_rank": 4}, choices=KL, reference=True),
        Case(referred, Parallel(ranks=2, offload="optimizer"), choices=EMA, reference=True),
        Case(plain, Parallel(ranks=2, offload="all")),
        Case(plain, tensor, model={"lora_rank": 4}),
        Case(values, sequence, PPO, BOTH),
    ]
    assert len(values) >= 4, "more than one row for each rank"
    keeps = [(Case(referred, TWO, {**PPO, **EMA, "preset": "ppo"}, BOTH, reference=True), place / "all")]
    keeps += [(Case(plain, tensor, model={"lora_rank": 4, **bf16}), place / "adapters")]
    for _, kept_at in keeps:
        kept_at.mkdir()
    folder = str(tiny_folder("llama"))
    agreed, of_peers, results, kept = on_ranks(place, work, folder, cases, keeps)
    paths = [path for _, path in keeps]
    pairs = list(zip(cases, results, strict=True)), list(zip(kept, paths, strict=True))
    return Found(folder, agreed, of_peers, *pairs)


def test_what_ranks_tell_each_other(found: Found) -> None:
    flags, together, norm = found.agreed
    assert flags == [True, False, False]
    assert together.numbers() == {"seen": 3, "top": 0, "first": 1}
    assert norm == 5
    assert found.of_peers.numbers() == {"seen": 3, "top": 1}


@pytest.mark.thorough
def test_ranks_are_one_process(found: Found) -> None:
    """Also where one of them has nothing to do; and what a model and its reference say of tokens afterwards."""
    for case, result in found.results:
        alone = check(case, result, found.folder)
        own = slice(None) if case.parallel is None or case.parallel.data == 1 else slice(None, None, case.parallel.data)
        for column, values in result.annotated.items():
            pairs = zip(case.rows[own], values, strict=True)
            mine = np.concatenate([v for row, v in pairs if row.loss_tokens])
            rows = [i for i, row in enumerate(r for r in case.rows if r.loss_tokens)]
            wanted = [i for i, row in enumerate(case.rows) if row.loss_tokens]
            theirs = dict(zip(wanted, (alone.annotated[column][i] for i in rows), strict=True))
            every = range(len(case.rows))[own]
            expected = np.concatenate([theirs[i] for i in every if i in theirs])
            np.testing.assert_allclose(mine, expected, rtol=1e-4)


@pytest.mark.thorough
def test_ranks_say_of_single_tokens_what_one_process_says(found: Found) -> None:
    for case, result in found.results:
        alone = train(found.folder, replace(case.alone, updates=1))
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
        start = Crew.of(found.folder, case.alone).weights()
        moved = any(not torch.equal(a, b) for a, b in zip(result.weights, start, strict=True))
        assert moved == (not spoilt)


def test_one_process_goes_on_from_what_ranks_saved(found: Found) -> None:
    """To the bit; although they went on training while it was written."""
    for kept, place in found.kept:
        crew = Crew.of(found.folder, kept.case.alone)
        crew.worker.load(place)
        assert crew.worker.updates == 2
        assert all(torch.equal(a, b) for a, b in zip(crew.weights(), kept.weights, strict=True))
        rough = "dtype" in kept.case.model
        assert crew.update(3) == pytest.approx(kept.third, rel=0.05 if rough else 2e-4, abs=1e-2 if rough else 1e-6)


def test_an_export_of_ranks_is_that_of_one_process(found: Found, tmp_path: Path) -> None:
    for number, (kept, place) in enumerate(found.kept):
        crew = Crew.of(found.folder, kept.case.alone)
        crew.worker.load(place)
        crew.update(3)
        export_policy(crew.worker.policy, tmp_path / str(number))
        mine, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / str(number), place / "model"))
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=0.02, atol=2e-3)
        assert {p.name for p in (tmp_path / str(number)).iterdir()} == {p.name for p in (place / "model").iterdir()}
