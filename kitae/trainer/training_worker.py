"""The work of one rank on packed rows, with the models, or the shards of models, that it holds.

Synchronous; its callers run it in one thread.

The state of the models lies in a folder: one process writes one file, ranks write a shard each.

    state.safetensors    from one process
    sharded/             from ranks: a distributed checkpoint of torch

One process and any number of ranks can read either: each rank finds its parts by the tensors' names and by their place
in the whole tensors.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from kitae.data.packing import Row
from kitae.engines.proof import UNIFORM
from kitae.errors import StoreError
from kitae.models.classifier import export_scalar
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.models.whole import place_of
from kitae.models.written_folder import export_policy
from kitae.observe.meter import Kind, Totals
from kitae.trainer.base import Column, Conditions, Role
from kitae.trainer.collective_ops import Alone, Distributed, Ranks
from kitae.trainer.config import LearningConfig
from kitae.trainer.objectives import PolicyScorer, Recomputed, TokenScorer
from kitae.trainer.reference_policy import Reference
from kitae.trainer.trainable_model import TrainableModel, outputs

T = TypeVar("T")

_UPDATES, _REFERENCE = "updates", "reference"


class Worker:
    """One rank's models and what it computes with them. The models may be sharded already.

    trained: the models that learn; the policy is always one of them. teacher: gives the log-probs of the column
    TEACHER, where the algorithm reads it.
    """

    def __init__(
        self,
        policy: Policy,
        training: LearningConfig,
        trained: Mapping[Role, TrainableModel],
        *,
        reference: Reference | None = None,
        teacher: TokenScorer | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.policy = policy
        self.training = training
        self.trained = trained
        self.reference = reference
        self.teacher = teacher
        self.ranks = ranks or Alone()

    @property
    def updates(self) -> int:
        return self.trained[Role.POLICY].optimizer.updates

    def annotate(self, rows: Sequence[Row], columns: Collection[Column]) -> dict[Column, list[Any]]:
        """For each column, the numbers of each row's loss tokens; for EXPERTS, those of all positions, `[T, L, K]`."""
        found: dict[Column, list[Any]] = {}
        if Column.EXPERTS in columns:
            found[Column.OLD], found[Column.EXPERTS] = self.trained[Role.POLICY].routed_outputs(rows)
        for column in [each for each in columns if each not in found]:
            if column is Column.REFERENCE:
                assert self.reference is not None, "there is no reference"
                found[column] = self.reference.outputs(rows)
            elif column is Column.PROOF:
                objective = self.trained[Role.POLICY].objective
                assert isinstance(objective, PolicyScorer), "a policy makes proofs"
                found[column] = outputs(Recomputed(objective), rows, columns=(UNIFORM,))
            elif column is Column.TEACHER:
                assert self.teacher is not None, "there is no teacher"
                found[column] = outputs(self.teacher, rows)
            else:
                role = Role.POLICY if column is Column.OLD else Role.CRITIC
                found[column] = self.trained[role].outputs(_for(role, rows))
        return found

    def forward_backward(self, rows: Sequence[Row], conditions: Conditions, roles: Collection[Role]) -> Totals:
        totals = Totals.of(Kind.MAX, threads=torch.get_num_threads())  # the order of summation depends on this number
        for role in roles:
            totals += self.trained[role].forward_backward(_for(role, rows), conditions)
        totals += _device_memory(self.policy.device)
        return self.ranks.together(totals)

    def optim_step(self) -> Totals:
        """Update every model that has gradients."""
        totals = Totals()
        for trained in self.trained.values():
            if trained.pending:
                totals += trained.optim_step()
        return totals

    def finish_step(self, step: int) -> None:
        if self.reference:
            self.reference.finish_step(step)

    def weights(self) -> Mapping[str, Tensor]:
        """The trainable parameters by name, as the modules hold them: shared memory, not copies."""
        optimizer = self.trained[Role.POLICY].optimizer
        return dict(zip(optimizer.names, (p.detach() for p in optimizer.parameters), strict=True))

    def save(self, folder: Path) -> None:
        self.begin_save(folder)()

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Start saving; the function returned waits for the end. Sharded models may be trained in between."""
        if isinstance(self.ranks, Distributed):
            return begin_save(self._state(), folder, self.ranks.saving)
        save(self._state(), folder)
        return lambda: None

    def export(self, folder: Path) -> None:
        """Write the trained model as a folder that other programs load. All ranks must call it."""
        model = self.trained[Role.POLICY].objective.model
        if isinstance(model, ScalarModel):
            export_scalar(model, folder)
        else:
            export_policy(self.policy, folder)

    def load(self, folder: Path) -> None:
        """Load what one process or any number of ranks saved. All ranks must call it."""
        group = self.ranks.saving if isinstance(self.ranks, Distributed) else None
        self._load_state(load(folder, self._blank, group))

    def _state(self) -> dict[str, Tensor]:
        """All state in one flat table: `{"policy.master.model.norm.weight": …, "policy.updates": …, …}`."""
        state = dict[str, Tensor]()
        for role, trained in self.trained.items():
            state |= _under(role.value, trained.optimizer.state())
            state[f"{role.value}.{_UPDATES}"] = torch.tensor(trained.optimizer.updates)
        return state | (_under(_REFERENCE, self.reference.state()) if self.reference else {})

    def _blank(self, names: Collection[str]) -> dict[str, Tensor]:
        state = dict[str, Tensor]()
        for role, trained in self.trained.items():
            state |= _under(role.value, trained.optimizer.blank(_below(role.value, dict.fromkeys(names))))
            state[f"{role.value}.{_UPDATES}"] = torch.tensor(0)
        if self.reference:
            state |= _under(_REFERENCE, self.reference.blank(_below(_REFERENCE, dict.fromkeys(names))))
        return state

    def _load_state(self, state: Mapping[str, Tensor]) -> None:
        for role, trained in self.trained.items():
            own = _below(role.value, state)
            trained.optimizer.load_state(own, int(own[_UPDATES]))
        if self.reference:
            self.reference.load_state(_below(_REFERENCE, state))


def _for(role: Role, rows: Sequence[Row]) -> Sequence[Row]:
    """Rows for a model: the experts recorded in them are the policy's, so the critic chooses its own."""
    return rows if role is Role.POLICY else [replace(row, experts_TLK=None) for row in rows]


def _under(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _below(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    """The inverse of `_under`: the entries below a prefix, without it."""
    return {n.removeprefix(f"{prefix}."): value for n, value in values.items() if n.startswith(f"{prefix}.")}


def _device_memory(device: torch.device) -> Totals:
    """The largest share of the GPU's memory that this process has allocated so far."""
    if device.type != "cuda":
        return Totals()
    _, total = torch.cuda.mem_get_info(device)
    return Totals.of(Kind.MAX, device_memory_share=torch.cuda.max_memory_allocated(device) / total)


FILE, FOLDER = "state.safetensors", "sharded"

Blank = Callable[[Collection[str]], dict[str, Tensor]]
"""Makes empty tensors, sharded or not, for a state with the given names."""


def save(state: Mapping[str, Tensor], folder: Path) -> None:
    """Save the state of one process."""
    save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, folder / FILE)


def begin_save(state: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup) -> Callable[[], None]:
    """Start saving the state of all ranks. Returns as soon as the tensors are copied and may change.

    The function returned waits until the files are complete. All ranks must call both. group: must not be used for
    anything else meanwhile.
    """
    saving: Any = async_save(dict(state), checkpoint_id=folder / FOLDER, process_group=group)

    def wait() -> None:
        saving.result()

    return wait


def files_of_rank(folder: Path, rank: int) -> list[Path]:
    """What a rank has written of a state; the first one also writes what there is."""
    own = (f"__{rank}_*.distcp", *((".metadata",) if rank == 0 else ()))
    return [path for pattern in own for path in (folder / FOLDER).glob(pattern)]


def load(folder: Path, blank: Blank, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """The state saved in a folder, in tensors that `blank` makes. All ranks must call it; group None: one process."""
    if (folder / FOLDER).is_dir():
        return _load_shards(folder / FOLDER, blank, group)
    if not (folder / FILE).is_file():
        raise StoreError(f"{folder} must hold {FILE} or {FOLDER}/, got neither: another version of Kitae has saved it")
    return _load_file(folder / FILE, blank)


def _load_shards(folder: Path, blank: Blank, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    state = _blank(folder, FileSystemReader(folder).read_metadata().state_dict_metadata.keys(), blank)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended: there is one process
        read(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    return state


def _load_file(file: Path, blank: Blank) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as saved:
        state = _blank(file, {*saved.keys()}, blank)
        for name, tensor in state.items():
            if isinstance(tensor, DTensor):
                tensor.to_local().copy_(saved.get_slice(name)[place_of(tensor)])
            else:
                tensor.copy_(saved.get_tensor(name))
    return state


def _blank(source: Path, names: Set[str], blank: Blank) -> dict[str, Tensor]:
    state = blank(names)
    if missing := sorted(names ^ state.keys()):
        raise StoreError(
            f"{source} must hold what is trained and nothing else, but differs in {missing[0]} and {len(missing) - 1} "
            f"others"
        )
    return state
