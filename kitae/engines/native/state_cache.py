"""What mixers carry from token to token, beside the pages: a slot of fixed size for each sequence that is decoded, for
each prompt that samples still begin with, and for each session that is kept.

A slot holds the state after all tokens whose keys and values are in the holder's pages, in every mixer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kitae.models.policy import Policy
from kitae.models.state_seam import MixerCall, States


class StateCache:
    """The slots. One more than can be taken is there for rows of a batch that hold no sequence."""

    def __init__(self, policy: Policy, slots: int) -> None:
        self.slots = slots
        self._like = policy.states()
        self._device = policy.device
        self._tensors: dict[int, States] = {}
        self.allocate()

    @staticmethod
    def bytes_of(policy: Policy) -> int:
        """Bytes of a slot; 0: the model has no mixers."""
        return sum(t.numel() * t.element_size() for states in policy.states().values() for t in states.values())

    def allocate(self) -> None:
        self._tensors = {
            number: {name: state.new_zeros(self.slots + 1, *state.shape[1:]) for name, state in states.items()}
            for number, states in self._like.items()
        }

    def free(self) -> None:
        self._tensors = {}

    def read(self, number: int, slots_B: Tensor) -> States:
        """Copies of a mixer's states."""
        return {name: state.index_select(0, slots_B) for name, state in self._tensors[number].items()}

    def write(self, number: int, slots_B: Tensor, states: States) -> None:
        for name, kept in self._tensors[number].items():
            kept.index_copy_(0, slots_B, states[name].to(kept.dtype))

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        if not source:
            return
        here, there = (torch.tensor(slots, device=self._device) for slots in (source, target))
        for number in self._tensors:
            self.write(number, there, self.read(number, here))

    def swap_out(self, slot: int) -> tuple[Tensor, ...]:
        """A copy of a slot in the memory of the host. It may be reused at once, since the device works in order."""
        found = []
        for states in self._tensors.values():
            for state in states.values():
                host = torch.empty_like(state[slot], device="cpu", pin_memory=state.is_cuda)
                found.append(host.copy_(state[slot], non_blocking=True))
        return tuple(found)

    def swap_in(self, swapped: Sequence[Tensor], slot: int) -> None:
        kept = [state for states in self._tensors.values() for state in states.values()]
        for state, host in zip(kept, swapped, strict=True):
            state[slot].copy_(host, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Follows:
    """Row positions `[row, row + length)` go on from the state in a slot, and leave theirs in one.

    before: None at the start of a sequence.
    """

    row: int
    length: int
    before: int | None
    after: int


class PromptStates:
    """Prompts and tails of sequences in one packed row. Those of the same length are computed together: nothing may
    fill up a batch whose states are kept."""

    def __init__(self, cache: StateCache, parts: Sequence[Follows], device: torch.device) -> None:
        self._cache = cache
        alike: dict[tuple[int, bool], list[Follows]] = {}
        for part in parts:
            alike.setdefault((part.length, part.before is None), []).append(part)
        self._batches = [_Batch.of(same, device) for same in alike.values()]

    def carry(self, call: MixerCall) -> None:
        for batch in self._batches:
            before = {} if batch.before_B is None else self._cache.read(call.number, batch.before_B)
            self._cache.write(call.number, batch.after_B, call.run(batch.rows_BL, before))


@dataclass(frozen=True, slots=True)
class _Batch:
    rows_BL: Tensor
    before_B: Tensor | None
    after_B: Tensor

    @classmethod
    def of(cls, same: Sequence[Follows], device: torch.device) -> "_Batch":
        rows = torch.tensor([part.row for part in same])[:, None] + torch.arange(same[0].length)
        before = [part.before for part in same if part.before is not None]
        after = torch.tensor([part.after for part in same], device=device)
        return cls(rows.to(device), torch.tensor(before, device=device) if before else None, after)


class StepStates:
    """One token for each of B sequences, in these slots."""

    def __init__(self, cache: StateCache, slots_B: Tensor) -> None:
        self._cache, self._slots_B = cache, slots_B
        self._rows_B1 = torch.arange(len(slots_B), device=slots_B.device)[:, None]

    def carry(self, call: MixerCall) -> None:
        states = call.run(self._rows_B1, self._cache.read(call.number, self._slots_B))
        self._cache.write(call.number, self._slots_B, states)
