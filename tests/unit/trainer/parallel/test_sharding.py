"""Ten updates on one to four real ranks, spread in every way, against one process; checkpoints, resharded."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_ranks
from safetensors.torch import load_file
from sharded import BOTH, GRPO, PPO, SHAPES, Case, Crew, Result, check, one_rank, one_sided, rows_of, train, with_values
from test_gradient import make_samples
from torch import Tensor

from kitae.data.packing import Row
from kitae.errors import ConfigError, StoreError
from kitae.models.classifier import export_scalar
from kitae.models.load import has_bfloat16
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.trainer.parallel.mesh import Mesh, Parallel
from kitae.trainer.parallel.sharding import shard, split_experts
from kitae.trainer.training_worker import files_of_rank

TinyFolder = Callable[[str], Path]
MOVING = {**PPO, "kl_coef": 0.1, "reference": "ema", "reference_every": 1, "reference_mix": 0.25}


def plain() -> list[Row]:
    """Uneven, and a multiple of twelve, so that two, three and four ranks have as many."""
    return rows_of(make_samples(SHAPES, gaps=True), GRPO, multiple=12)


def valued() -> list[Row]:
    samples = [s.with_columns(logp_ref=s.columns["logp_mu"]) for s in with_values(make_samples(SHAPES))]
    return rows_of(samples, MOVING, multiple=12)


@dataclass(frozen=True)
class Task:
    """A model and what becomes of it."""

    folder: str
    case: Case
    tolerance: float = 1e-6


def run(tasks: list[Task]) -> list[Result]:
    return [train(task.folder, task.case) for task in tasks]


def ten(rows: list[Row], parallel: Parallel, **settings: Any) -> Case:
    return Case(rows, parallel, updates=10, **settings)


def agree(tasks: list[Task], place: Path) -> None:
    (ranks,) = {task.case.parallel.ranks for task in tasks if task.case.parallel is not None}
    for task, result in zip(tasks, on_ranks(place, run, tasks, size=ranks), strict=True):
        assert len(result.numbers) == task.case.updates
        check(task.case, result, task.folder, task.tolerance)


def test_one_rank_is_one_process(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    case = Case(plain(), Parallel())
    with one_rank(tmp_path):
        result = train(str(tiny_folder("llama")), case)
    check(case, result, str(tiny_folder("llama")))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    llama, moe = str(tiny_folder("llama")), str(tiny_folder("qwen3_moe"))
    tensor, sequence = Parallel(ranks=2, tensor=2), Parallel(ranks=2, sequence=2)
    cases = [
        Task(llama, ten(plain(), Parallel(ranks=2))),
        Task(llama, ten(plain(), tensor)),
        Task(llama, ten(plain(), sequence)),
        Task(llama, ten(valued(), tensor, choices=MOVING, roles=BOTH, reference=True)),
        Task(llama, ten(valued(), sequence, choices=MOVING, roles=BOTH, reference=True)),
        Task(moe, ten(plain(), Parallel(ranks=2, expert=2))),
        Task(moe, ten(plain(), Parallel(ranks=2, expert=2, sequence=2))),
    ]
    agree(cases, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    llama, all_three = str(tiny_folder("llama")), Parallel(ranks=4, tensor=2, sequence=2)
    cases = [
        Task(llama, ten(plain(), Parallel(ranks=4))),
        Task(llama, ten(one_sided(plain(), 4), Parallel(ranks=4))),
        Task(llama, ten(plain(), Parallel(ranks=4, tensor=2))),
        Task(llama, ten(one_sided(plain()), Parallel(ranks=4, sequence=2))),
        Task(llama, ten(plain(), all_three)),
    ]
    agree(cases, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_other_models_on_four_ranks(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Biases, norms of heads, windows, experts, adapters; more ranks of a sequence than key-value heads."""
    names = ("llama", "qwen2", "qwen3", "gemma3", "qwen3_moe")
    llama, qwen2, qwen3, gemma3, moe = (str(tiny_folder(name)) for name in names)
    lora, both = {"lora_rank": 4}, Parallel(ranks=4, tensor=2)
    cases = [
        # Rounding: fused or not, one process differs by 1.2e-6 from itself, and updates make more of it.
        Task(qwen2, Case(one_sided(plain()), both), 5e-6),
        Task(gemma3, Case(plain(), both), 5e-6),
        Task(qwen3, Case(plain(), both)),
        Task(qwen3, Case(plain(), Parallel(ranks=4, sequence=4))),
        Task(gemma3, Case(plain(), Parallel(ranks=4, sequence=2))),
        Task(llama, Case(valued(), both, choices=MOVING, roles=BOTH, reference=True, model=lora)),
        Task(moe, Case(plain(), Parallel(ranks=4, expert=2))),
    ]
    agree(cases, tmp_path)


@dataclass(frozen=True)
class Moment:
    """A worker's whole state, and the numbers of the update that follows."""

    state: dict[str, Tensor]
    following: dict[str, float]


def save(task: Task, place: Path) -> Moment:
    crew = Crew.of(task.folder, task.case)
    crew.update(1)
    crew.update(2)
    crew.worker.save(place)
    return Moment(crew.state(), crew.update(3))


def load(task: Task, place: Path) -> Moment:
    crew = Crew.of(task.folder, task.case)
    crew.update(1)  # so that there is something to replace
    crew.worker.load(place)
    return Moment(crew.state(), crew.update(3))


def save_all(tasks: list[Task], places: list[Path]) -> list[Moment]:
    return [save(*each) for each in zip(tasks, places, strict=True)]


def load_all(tasks: list[Task], places: list[Path]) -> list[Moment]:
    return [load(*each) for each in zip(tasks, places, strict=True)]


def on(tasks: list[Task], parallel: Parallel | None) -> list[Task]:
    return [replace(task, case=replace(task.case, parallel=parallel)) for task in tasks]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("parallel", [None, Parallel(ranks=2), Parallel(ranks=4, tensor=2)])
def test_checkpoints_are_resharded(parallel: Parallel | None, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """To the bit: masters, moments, counts, reference; from one process too, and on one, three ranks and 2 × 2."""
    llama, bf16 = str(tiny_folder("llama")), {"dtype": "bfloat16" if has_bfloat16() else "float32"}
    tasks = [
        Task(llama, Case(valued(), None, choices=MOVING, roles=BOTH, reference=True)),
        Task(llama, Case(plain(), None, model={"lora_rank": 4})),
        Task(llama, Case(plain(), None, model=bf16)),
    ]
    places = [tmp_path / str(i) for i in range(len(tasks))]
    for each in places:
        each.mkdir()
    if parallel is None:
        saved = save_all(tasks, places)
    else:
        saved = on_ranks(tmp_path, save_all, on(tasks, parallel), places, size=parallel.ranks)
    threes = on_ranks(tmp_path, load_all, on(tasks, Parallel(ranks=3)), places, size=3)
    fours = on_ranks(tmp_path, load_all, on(tasks, Parallel(ranks=4, tensor=2)), places, size=4)
    for found in (threes, fours, load_all(tasks, places)):
        for task, before, after in zip(tasks, saved, found, strict=True):
            same(before, after, 0.05 if task.case.model == bf16 else 1e-5)


def same(before: Moment, after: Moment, tolerance: float) -> None:
    assert before.state.keys() == after.state.keys()
    assert any(name.startswith("policy.exp_avg.") for name in before.state)
    for name, tensor in before.state.items():
        assert torch.equal(tensor, after.state[name]), name
    for name in ("loss", "grad_norm"):
        assert after.following[name] == pytest.approx(before.following[name], rel=tolerance, abs=tolerance)


def test_a_rank_goes_on_from_what_one_process_saved(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    case = Case(valued(), None, choices=MOVING, roles=BOTH, reference=True)
    task = Task(str(tiny_folder("llama")), case)
    saved = save(task, tmp_path)
    with one_rank(tmp_path):
        same(saved, load(replace(task, case=replace(case, parallel=Parallel())), tmp_path), 1e-5)


def test_each_file_of_a_checkpoint_is_of_some_rank(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """So that it is summed up by who wrote it."""
    with one_rank(tmp_path):
        Crew.of(str(tiny_folder("llama")), Case(plain(), Parallel())).worker.save(tmp_path / "saved")
    written = {path for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    assert written == {*files_of_rank(tmp_path / "saved", 0)} and not files_of_rank(tmp_path / "saved", 1)


def test_a_folder_without_a_state_is_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"must hold state\.safetensors or sharded/, got neither"):
        Crew.of(str(tiny_folder("llama")), Case(plain(), None)).worker.load(tmp_path)


def test_a_checkpoint_of_something_else_is_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = str(tiny_folder("llama"))
    with one_rank(tmp_path):
        Crew.of(folder, Case(plain(), Parallel(), model={"lora_rank": 4})).worker.save(tmp_path)
    with pytest.raises(StoreError, match=r"must hold what is trained and nothing else, but differs in policy\.master"):
        Crew.of(folder, Case(plain(), None)).worker.load(tmp_path)


def test_a_sharded_reward_model_is_exported(tiny_policy: Callable[..., Policy], tmp_path: Path) -> None:
    def exported(model: ScalarModel, name: str) -> dict[str, Tensor]:
        export_scalar(model, tmp_path / name)
        state: dict[str, Tensor] = load_file(tmp_path / name / "model.safetensors")
        return state

    whole, sharded = (ScalarModel(tiny_policy(lora_rank=4), bias=False) for _ in range(2))
    for model in (whole, sharded):
        torch.nn.init.ones_(model.head.weight)
    with one_rank(tmp_path):
        shard(sharded, Mesh(Parallel(), torch.device("cpu")))
        found = exported(sharded, "sharded")
    expected = exported(whole, "whole")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 0}, "ranks must be at least 1, got 0"),
        ({"ranks": 6, "tensor": 2, "sequence": 2}, "multiple of tensor x sequence = 4, got 6"),
        ({"ranks": 4, "tensor": 2, "expert": 2}, "expert > 1 needs tensor = 1, got expert 2 and tensor 2"),
        ({"ranks": 3, "expert": 2}, "ranks must be a multiple of expert = 2, got 3"),
        ({"offload": "some"}, "offload must be one of none, optimizer, all, got 'some'"),
    ],
)
def test_impossible_meshes(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Parallel(**settings)


def test_heads_must_divide(tiny_policy: Callable[..., Policy]) -> None:
    """The tiny model has four heads, and two for keys and values."""
    policy = tiny_policy()
    for parallel in (Parallel(4, 2, 2), Parallel(4, 1, 4), Parallel(2, 2), Parallel(2, 1, 2)):
        parallel.check(policy)
    with pytest.raises(ConfigError, match=r"tensor must divide the key-value heads of .*, 2; got tensor = 4"):
        Parallel(4, 4).check(policy)
    with pytest.raises(ConfigError, match=r"tensor x sequence must divide the attention heads of .*, 4; got 1 x 3"):
        Parallel(3, 1, 3).check(policy)
    policy.heads, policy.kv_heads = 12, 6
    with pytest.raises(ConfigError, match=r"sequence must divide the key-value heads .*, 6, or be a multiple .* = 4"):
        Parallel(4, 1, 4).check(policy)
    with pytest.raises(ConfigError, match="expert > 1 needs a model with a plan that sends tokens to experts"):
        split_experts(policy, None, None)  # type: ignore[arg-type]


def test_a_mesh_has_as_many_ranks_as_there_are_processes(tmp_path: Path) -> None:
    with one_rank(tmp_path), pytest.raises(ConfigError, match="as many as there are processes, 1, got 2"):
        Mesh(Parallel(ranks=2), torch.device("cpu"))
