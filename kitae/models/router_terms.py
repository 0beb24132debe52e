"""Losses for the routers of a mixture of experts, added to the loss that the model is trained for.

    z: Σ w (log Σ_e exp logit_e)²       keeps logits small, so that they round well
    balance: E Σ_e f_e Σ w p_e          is least if all experts are equally likely

Both are means over layers. They are computed at the states that predict loss tokens, with the weights w of these
tokens: so they are plain sums like the loss itself, and their gradient does not depend on how a batch is cut into rows.
f_e is the share of expert e in all choices of the batch. The choices are recorded beforehand (see
`kitae.models.routing`), so f is known before the first pass.

Legend: N loss tokens, T tokens of a row, L layers that mix experts, E experts of each, K that one token gets.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kitae.data.packing import NO_RECORD, Row
from kitae.models.routing import RouterShape, hanging, in_backward, routers_of


@dataclass(frozen=True, slots=True)
class RouterCoefficients:
    """The coefficients of the two terms: `RouterCoefficients(z=1e-3, balance=1e-2)`."""

    z: float = 0.0
    balance: float = 0.0


@dataclass(slots=True)
class RouterTerms:
    """The terms for the passes over one batch: `with terms.watch(): loss = …; loss + terms.of(source_N, weight_N)[0]`.

    f_LE: None if there is no balance term.
    """

    model: nn.Module
    coefficients: RouterCoefficients
    f_LE: Tensor | None = None
    _logits: dict[int, Tensor] = field(default_factory=dict)  # router logits of the last pass, by layer

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record the router logits of one pass. Its backward pass must be within the context too."""
        thread = threading.get_ident()

        def keep(layer: int, router: nn.Module, _: Any, output: Any) -> None:
            if threading.get_ident() == thread and not in_backward():
                self._logits[layer] = output[0]

        with hanging(keep, routers_of(self.model)):
            yield
        self._logits.clear()

    def of(self, source_N: Tensor, weight_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The term to add to the loss of the pass, and its parts without coefficients, detached."""
        logits_LNE = torch.stack([self._logits[i][source_N].float() for i in range(len(self._logits))])
        found = {"router_z": (logits_LNE.logsumexp(-1).square() * weight_N).sum(-1).mean()}
        if self.f_LE is not None:
            p_LE = (logits_LNE.softmax(-1) * weight_N[:, None]).sum(1)
            found["router_balance"] = logits_LNE.shape[-1] * (self.f_LE.to(p_LE) * p_LE).sum(-1).mean()
        total = self.coefficients.z * found["router_z"]
        if "router_balance" in found:
            total = total + self.coefficients.balance * found["router_balance"]
        return total, {name: value.detach() for name, value in found.items()}


def chosen_shares(rows: Iterable[Row], shape: RouterShape) -> Tensor:
    """f_LE of a batch: shares of the recorded choices at positions that predict loss tokens, by these tokens'
    weights."""
    f_LE = np.zeros((shape.layers, shape.experts))
    for row in rows:
        if row.experts_TLK is None:
            continue
        chosen_NLK = row.experts_TLK[row.source_N].astype(np.int64)
        known_NLK = chosen_NLK != NO_RECORD
        layer_NLK = np.broadcast_to(np.arange(shape.layers)[None, :, None], chosen_NLK.shape)
        weight_NLK = np.broadcast_to(row.weight_N[:, None, None], chosen_NLK.shape)
        np.add.at(f_LE, (layer_NLK[known_NLK], chosen_NLK[known_NLK]), weight_NLK[known_NLK])
    return torch.from_numpy(f_LE / np.maximum(f_LE.sum(-1, keepdims=True), 1e-30)).float()
