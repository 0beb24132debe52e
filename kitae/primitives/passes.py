"""Passes of several models in one row: forward, losses by datum, and gradients, each for its own adapter.

run() ─► queue ─► all that wait, model after model ─► rows of as many tokens as pay ─► one after the other, in a thread
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from kitae.errors import TrainerError
from kitae.models.adapters import SlicedRows, using
from kitae.models.policy import Policy
from kitae.primitives.datum import CheckedDatum, Datum, checked, lay_out
from kitae.primitives.token_losses import Settings, TokenLoss, find_loss
from kitae.primitives.trained_model import TrainedModel
from kitae.trainer.config import LearningConfig
from kitae.trainer.forward import MicroBatch, token_budget
from kitae.trainer.objectives import PolicyScorer
from kitae.types import FloatArray

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class PassResult:
    """Of each datum, in the shape of its targets: log-probs and losses; loss: the sum of all."""

    logprobs: tuple[FloatArray, ...]
    losses: tuple[FloatArray, ...]

    @property
    def loss(self) -> float:
        return float(sum(losses.sum(dtype=np.float64) for losses in self.losses))


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    model: TrainedModel
    data: Sequence[CheckedDatum]
    loss: TokenLoss
    settings: Settings
    backward: bool
    found: "asyncio.Future[PassResult]"


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A datum on its way: where its numbers belong, and which pass wants them."""

    wanted: _Pass
    number: int
    datum: CheckedDatum


class Passes:
    """The thread that trains. `run` from any task of one event loop."""

    def __init__(self) -> None:
        self._waiting: list[_Pass] = []
        self._working: asyncio.Task[None] | None = None
        self._threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "kitae-trainer", torch.set_num_threads, (self._threads,))

    async def run(
        self, model: TrainedModel, data: Sequence[Datum], loss: str, settings: Settings, *, backward: bool
    ) -> PassResult:
        """backward: the gradients are added to those that the model has. Raises `RequestError` for wrong data."""
        function, needs = find_loss(loss, settings)
        taken = checked(data, needs, model.policy)
        found: asyncio.Future[PassResult] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Pass(model, taken, function, settings, backward, found))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await found

    async def alone(self, work: Callable[[], T]) -> T:
        """Something else that the thread does, between passes."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        if self._working is not None:
            self._working.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        """Until nobody waits."""
        while self._waiting:
            await asyncio.sleep(0)  # those that came together go together
            taken, self._waiting = [p for p in self._waiting if not p.found.done()], []
            try:
                results = await self.alone(lambda: _compute(taken))  # noqa: B023
            except Exception as error:
                for wanted in taken:
                    if not wanted.found.done():
                        wanted.found.set_exception(_lost(error))
                continue
            for wanted, result in zip(taken, results, strict=True):
                if not wanted.found.done():
                    wanted.found.set_result(result)


def _lost(error: Exception) -> TrainerError:
    lost = TrainerError(f"a pass failed, and the gradients since the last update are lost: {error}")
    lost.__cause__ = error
    return lost


def _compute(passes: Sequence[_Pass]) -> list[PassResult]:
    found: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
    try:
        for policy, backward, pieces in _by_kind(passes):
            scorer = PolicyScorer(policy, LearningConfig(), 1.0)
            budget = token_budget(LearningConfig(), policy.device, policy.dtype)
            for row in _rows(pieces, budget):
                numbers = _compute_row(scorer, row, backward=backward)
                found |= {(id(p.wanted), p.number): own for p, own in zip(row, numbers, strict=True)}
    except Exception:
        for wanted in passes:
            wanted.model.drop_gradients()
        raise
    results = []
    for wanted in passes:
        own = [found[id(wanted), i] for i in range(len(wanted.data))]
        results.append(PassResult(tuple(logp for logp, _ in own), tuple(loss for _, loss in own)))
    return results


def _by_kind(passes: Sequence[_Pass]) -> Iterator[tuple[Policy, bool, list[_Piece]]]:
    """What may share rows: data of the same modules, with gradients or without, those of a model together."""
    kinds: dict[tuple[int, bool], list[_Pass]] = {}
    for wanted in passes:
        kinds.setdefault((id(wanted.model.policy), wanted.backward), []).append(wanted)
    for (_, backward), members in kinds.items():
        members.sort(key=lambda p: id(p.model))
        pieces = [_Piece(p, i, datum) for p in members for i, datum in enumerate(p.data)]
        yield members[0].model.policy, backward, pieces


def _rows(pieces: Iterable[_Piece], budget: int) -> Iterator[list[_Piece]]:
    """In order, as many as fit; a longer one has a row of its own."""
    row: list[_Piece] = []
    size = 0
    for piece in pieces:
        length = max(len(piece.datum.tokens_T), len(piece.datum.targets_N))
        if row and size + length > budget:
            yield row
            row, size = [], 0
        row.append(piece)
        size += length
    yield row


def _compute_row(scorer: PolicyScorer, row: Sequence[_Piece], *, backward: bool) -> list[tuple[FloatArray, FloatArray]]:
    """Log-probs and losses of each piece."""
    device = scorer.policy.device
    ends = np.cumsum([len(p.datum.tokens_T) for p in row]).tolist()
    starts = [0, *ends]
    adapters = SlicedRows([(p.wanted.model.adapter, a, b) for p, a, b in zip(row, starts, ends, strict=False)])
    micro = MicroBatch.of(lay_out([p.datum for p in row]), device)
    with torch.set_grad_enabled(backward), using(adapters):
        logp_N, _ = scorer.score(micro)
        parts = torch.split(logp_N, [len(p.datum.targets_N) for p in row])
        losses = [_loss(p, part, device) for p, part in zip(row, parts, strict=True)]
        if backward:
            torch.cat(losses).sum().backward()  # type: ignore[no-untyped-call]
    shapes = [p.datum.shape for p in row]
    return [
        (logp.detach().float().cpu().numpy().reshape(shape), loss.detach().float().cpu().numpy().reshape(shape))
        for logp, loss, shape in zip(parts, losses, shapes, strict=True)
    ]


def _loss(piece: _Piece, logp_N: Tensor, device: torch.device) -> Tensor:
    inputs: Mapping[str, Any] = {n: torch.from_numpy(v).to(device) for n, v in piece.datum.inputs.items()}
    return piece.wanted.loss(logp_N, inputs, piece.wanted.settings)
