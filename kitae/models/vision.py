"""How a policy sees: features of pictures in the places of a row, and positions that know of rows and columns.

A picture's features are computed once, by the tower of transformers, and stand in each of its places in place of the
embedding. A tower that is not trained computes a picture once for engine and
trainer together. One that is trained computes it once for each pass of the trainer, where gradients of all places add
up, and once for each version in the engine.
"""

import inspect
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kitae.data.pictures import PICTURE
from kitae.errors import ModelError
from kitae.models.parts import decoder_of, towers_of
from kitae.models.picture_reader import PictureReader
from kitae.types import IntArray

_MOST_BYTES = 1 << 29  # of features that are kept
_TOGETHER = 64  # pictures that go through the tower at a time


class Vision:
    """`Vision(base, reader)`; base: the whole model of transformers, with its tower, which is trained or not. alone:
    each picture goes through the tower alone, and so gets the same features to the last bit."""

    def __init__(self, base: Any, reader: PictureReader, *, alone: bool = False) -> None:
        self.reader, self.alone = reader, alone
        self.trained = any(p.requires_grad for p in towers_of(base))
        self._model, self._decoder = base.model, (decoder := decoder_of(base))
        self._turns = getattr(self._model, "get_rope_index", None)
        self._deep = "deepstack_visual_embeds" in inspect.signature(decoder.forward).parameters
        self._takes = inspect.signature(self._model.get_image_features).parameters.keys()
        self._kept: OrderedDict[int, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def moves(self) -> bool:
        """Whether a picture moves the positions of the tokens after it (M-RoPE)."""
        return self._turns is not None

    def share(self, other: "Vision") -> None:
        """Keep features together with another one, whose tower is the same."""
        self._kept, self._lock = other._kept, other._lock

    def forget(self) -> None:
        """The weights of the tower have changed."""
        with self._lock:
            self._kept.clear()

    def keywords(self, tokens_T: Tensor) -> dict[str, Any]:
        """What a decoder gets in place of a row's tokens; {}: the row shows no picture.

        Each sequence of the row has all places of its pictures, in their order.
        """
        seen_T = tokens_T >= PICTURE
        tokens = tokens_T[seen_T].tolist()
        if not tokens:
            return {}
        found = self._features(list(dict.fromkeys(tokens)))
        met = dict.fromkeys(found, 0)
        starts, total = {}, 0
        for token, features in found.items():
            starts[token], total = total, total + features.shape[1]
        rows = []
        for token in tokens:
            rows.append(starts[token] + met[token] % found[token].shape[1])
            met[token] += 1
        every = torch.cat(list(found.values()), 1)[:, torch.tensor(rows, device=tokens_T.device)]  # [1 + deep, n, H]
        embeds = self._decoder.get_input_embeddings()(tokens_T.masked_fill(seen_T, self.reader.soft_id))
        embeds = embeds.masked_scatter(seen_T[:, None], every[0].to(embeds.dtype))
        given: dict[str, Any] = {"inputs_embeds": embeds[None]}
        if self._deep:
            given |= {"visual_pos_masks": seen_T[None], "deepstack_visual_embeds": list(every[1:].to(embeds.dtype))}
        return given

    def _features(self, tokens: Sequence[int]) -> dict[int, Tensor]:
        """`[1 + deep, places, H]` of each: those that stand in place of embeddings, and those that layers add."""
        if self.trained and torch.is_grad_enabled():
            return self._compute(tokens)
        with self._lock:
            found = {token: self._kept[token] for token in tokens if token in self._kept}
        with torch.inference_mode(False), torch.no_grad():  # the trainer differentiates through what follows
            made = self._compute([token for token in tokens if token not in found])
        with self._lock:
            for token, features in (found | {t: f.clone() for t, f in made.items()}).items():  # not views of a batch
                self._kept.pop(token, None)
                self._kept[token] = features
                while (
                    len(self._kept) * features.nbytes > _MOST_BYTES and len(self._kept) > 1
                ):  # as if all were so large
                    self._kept.popitem(last=False)
        return found | made

    def _compute(self, tokens: Sequence[int]) -> dict[int, Tensor]:
        """Pictures whose inputs are alike go through the tower together; in exact mode each goes alone."""
        alike: dict[Any, list[int]] = {}
        for token in tokens:
            shapes = tuple((name, tuple(x.shape[1:])) for name, x in self._pixels(token).items())
            alike.setdefault(token if self.alone else shapes, []).append(token)
        found: dict[int, Tensor] = {}
        for group in alike.values():
            for part in (group[i : i + _TOGETHER] for i in range(0, len(group), _TOGETHER)):
                found |= dict(zip(part, self._pass(part), strict=True))
        return found

    def _pixels(self, token: int) -> dict[str, Tensor]:
        return {k: v for k, v in self.reader.see(token).pixels.items() if k in self._takes}

    def _pass(self, tokens: Sequence[int]) -> Sequence[Tensor]:
        device = next(self._model.parameters()).device
        each = [self._pixels(token) for token in tokens]
        pixels = {name: torch.cat([one[name] for one in each]).to(device) for name in each[0]}
        found = self._model.get_image_features(**pixels, return_dict=True)
        parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or () if self._deep else ())]
        features = torch.stack([_joined(part) for part in parts])
        places = [self.reader.places(token) for token in tokens]
        if features.shape[1] != sum(places):
            raise ModelError(
                f"the tower must give {sum(places)} places of pictures as many features, got {features.shape[1]}"
            )
        return torch.split(features, places, 1)

    def positions(self, tokens: Sequence[int]) -> IntArray | None:
        """`[3, T]`: where the tokens of a whole sequence are turned to; None: each to its place in the sequence."""
        tokens_T = np.asarray(tokens)
        seen_T = tokens_T >= PICTURE
        if self._turns is None or not seen_T.any():
            return None
        grids, row = [], 0
        pictures = tokens_T[seen_T]
        while row < len(pictures):
            grids.append(self.reader.see(int(pictures[row])).pixels["image_grid_thw"])
            row += self.reader.places(int(pictures[row]))
        ids = torch.from_numpy(np.where(seen_T, self.reader.soft_id, tokens_T))[None]
        kinds = torch.from_numpy(seen_T.astype(np.int64))[None]
        found, _ = self._turns(ids, kinds, image_grid_thw=torch.cat(grids))
        return np.asarray(found[:, 0].numpy(), dtype=np.int64)


def _joined(features: Any) -> Tensor:
    """`[n, H]`, of one picture, whose parts may come apart."""
    found: Tensor = torch.cat(list(features)) if isinstance(features, list | tuple) else features
    return found.reshape(-1, found.shape[-1])
