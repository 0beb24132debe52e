"""Weights by broadcast, bucket by bucket, over a process group of torch.distributed.

    receivers ── "I wait for version 4, and have 3" ──► publisher, by HTTP
              ◄── your rank, or: pull ─────────────────
    rank 0    ══ header, bucket, header, bucket … ════► ranks 1 … n

There is one round for each publication. It begins when all receivers that are connected wait for it, or `patience`
seconds after the first one does. Whoever comes later, or lacks the base of a delta that others have, pulls by HTTP from
the publisher, and so does everybody for buckets that a round did not bring: a round that fails, because one of its
members died, costs time and nothing else. The group is kept from round to round while its members are the same.

The header says which bucket of which version follows, so that nobody takes an old one or another for it. Bytes are
sent, whatever the dtype of the tensors.
"""

import json
import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from kitae.weights.base import Address, Manifest, Mode
from kitae.weights.http_transport import Downloads, Haste, HttpPublisher
from kitae.weights.layout import LIMIT, Chunk, delta_chunks, image_chunks
from kitae.weights.process_group import (
    Backend,
    BroadcastGroup,
    choose_backend,
    current_device,
    gpu_name,
    host_store,
    join_store,
)
from kitae.weights.receiver import PullReceiver

_PATIENCE = 10.0  # seconds that a round waits for its last member
_DEADLINE = 30.0  # seconds for one bucket, and for the members to meet
_HEADER = 5  # numbers

log = logging.getLogger("kitae")


@dataclass
class _Arrival:
    """A receiver that waits for a round. base: that it has. group: of which it still is a member. gpu: on which it
    computes (`kitae.weights.process_group.gpu_name`)."""

    base: int | None
    group: str | None
    gpu: str
    plan: dict[str, Any] | None = None


class BroadcastPublisher(HttpPublisher):
    """An `HttpPublisher` that is rank 0 of rounds. collectives: what carries them; auto: nccl, from GPU to GPU, if this
    process and all members of a round have a GPU each, else gloo, through host memory.

    patience and deadline: seconds, see above. `publish` never waits for a round.
    """

    def __init__(
        self,
        mode: Mode = "full",
        *,
        host: str = "127.0.0.1",
        collectives: Backend | Literal["auto"] = "auto",
        patience: float = _PATIENCE,
        deadline: float = _DEADLINE,
        haste: Haste | None = None,
        dense: float = 0.5,
        limit: int = LIMIT,
    ) -> None:
        super().__init__(mode, host=host, haste=haste, dense=dense, limit=limit)
        self.rounds = 0  # that went well
        self._changed = threading.Condition()
        self._announced: Manifest | None = None
        self._collectives = collectives
        self._gpu = gpu_name(current_device())
        self._patience = patience
        self._deadline = deadline
        self._meeting = host_store(host, deadline)
        self._host = host
        self._members: set[str] = set()  # connections of receivers
        self._waiting: dict[str, _Arrival] = {}
        self._begins = 0.0  # the latest
        self._sending = False
        self._begun = False  # the round of what was published last
        self._keys = 0
        self._group: BroadcastGroup | None = None
        self._ranks: dict[str, int] = {}  # of its members

    @property
    def address(self) -> Address:
        own = {"store": [self._host, self._meeting.port]}
        times = {"patience": self._patience, "deadline": self._deadline}
        return Address("broadcast", {**super().address.settings, **own, **times})

    def publish(self, version: int, tensors: Mapping[str, Tensor], *, in_full: bool = False) -> Manifest:
        manifest = super().publish(version, tensors, in_full=in_full)
        with self._changed:
            self._announced, self._begun = manifest, False
            self._changed.notify_all()
        return manifest

    def close(self) -> None:
        super().close()
        if self._group is not None:
            self._group.close()

    def call(self, member: str, what: str, body: dict[str, Any]) -> dict[str, Any] | None:
        if what == "join":
            with self._changed:
                self._members.add(member)
            return {}
        return self._gather(member, body) if what == "gather" else None

    def gone(self, member: str) -> None:
        with self._changed:
            self._members.discard(member)
            self._changed.notify_all()

    def _gather(self, member: str, body: dict[str, Any]) -> dict[str, Any]:
        """Wait for the round; the part in it."""
        arrival = _Arrival(body["base"], body["group"], body["gpu"])
        with self._changed:
            self._members.add(member)
            open_to = None if self._announced is None or self._sending or self._begun else self._announced.version
            if self._announced is None or open_to != body["version"]:
                return {"pull": True}
            if not self._waiting:
                self._begins = time.monotonic() + self._patience
            self._waiting[member] = arrival
            self._changed.notify_all()
            while arrival.plan is None:
                left = self._begins - time.monotonic()
                if self._members <= self._waiting.keys() or left <= 0:
                    self._begin(self._announced)
                else:
                    self._changed.wait(left)
        assert arrival.plan is not None
        return arrival.plan

    def _begin(self, manifest: Manifest) -> None:
        """Give everybody who waits a part."""
        arrivals, self._waiting = self._waiting, {}
        self._members &= arrivals.keys()
        has_base = {m for m, a in arrivals.items() if a.base is not None and a.base == manifest.base}
        members = sorted(has_base or arrivals)
        same = self._group is not None and {*members} == self._ranks.keys()
        if self._group is None or not same or any(arrivals[m].group != self._group.key for m in members):
            self._keys += 1
            self._ranks = {member: rank for rank, member in enumerate(members, 1)}
        key = str(self._keys)
        backend = choose_backend([self._gpu, *(arrivals[m].gpu for m in members)], self._collectives)
        plan = {"key": key, "size": len(members) + 1, "what": "delta" if has_base else "image", "backend": backend}
        for member, arrival in arrivals.items():
            arrival.plan = {**plan, "rank": self._ranks[member]} if member in members else {"pull": True}
        self._sending = self._begun = True
        chunks = delta_chunks(manifest) if has_base else image_chunks(manifest)
        given = (manifest.version, chunks, key, backend)
        threading.Thread(target=self._send, args=given, name="round", daemon=True).start()
        self._changed.notify_all()

    def _send(self, version: int, chunks: Sequence[Chunk], key: str, backend: Backend) -> None:
        group, size = self._group, len(self._ranks) + 1
        try:
            if group is None or group.key != key:
                if group is not None:
                    group.close()
                group = BroadcastGroup.make(self._meeting, key, 0, size, backend=backend, deadline=self._deadline)
            for chunk in chunks:
                data = self.store.get(chunk.name)
                here = data is not None and len(data) == chunk.bucket.bytes
                group.send(_header(version, chunk, here=here))
                if here and data is not None and len(data):
                    group.send(data)
            self.rounds += 1
        except RuntimeError as error:
            log.warning("version %d could not be broadcast to %d engines, who pull it: %s", version, size - 1, error)
            if group is not None:
                group.close()
            group = None
        with self._changed:
            self._group, self._sending = group, False
            self._changed.notify_all()


class BroadcastReceiver(PullReceiver):
    """A member of the rounds of a `BroadcastPublisher`, from when it is made. pulled: buckets that came by HTTP."""

    reader: "_BroadcastReader"

    @classmethod
    def at(cls, address: Address, parameters: Mapping[str, Tensor]) -> "BroadcastReceiver":
        device = next((each.device for each in parameters.values()), torch.device("cpu"))
        return cls(_BroadcastReader(address.settings, gpu_name(device)), parameters)

    @property
    def pulled(self) -> int:
        return self.reader.pulled


class _BroadcastReader:
    def __init__(self, settings: Mapping[str, Any], gpu: str = "") -> None:
        self.pulled = 0
        self._gpu = gpu
        self._settings = settings
        self._deadline: float = settings["deadline"]
        self._downloads = Downloads(settings["source"], settings["secret"], Haste(**settings["haste"]))
        self._line = _Line(settings["source"], settings["secret"], settings["patience"] + 10)
        self._store: Store | None = None
        self._group: BroadcastGroup | None = None
        self._line.post("join", {})

    def image(self, manifest: Manifest, wanted: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        chunks = image_chunks(manifest)
        if len(wanted) < sum(bool(chunk.spans) for chunk in chunks):
            return self._downloads.image(manifest, wanted)
        return self._take("image", manifest, chunks, None)

    def delta(self, manifest: Manifest) -> Iterator[tuple[int, Tensor]]:
        return self._take("delta", manifest, delta_chunks(manifest), manifest.base)

    def close(self) -> None:
        self._line.close()
        self._downloads.close()
        if self._group is not None:
            self._group.close()

    def _take(
        self, what: str, manifest: Manifest, chunks: Sequence[Chunk], base: int | None
    ) -> Iterator[tuple[int, Tensor]]:
        """By broadcast, and what that did not bring by HTTP."""
        group = None if self._group is None else self._group.key
        plan = self._line.post("gather", {"version": manifest.version, "base": base, "group": group, "gpu": self._gpu})
        missing = {chunk.number: chunk for chunk in chunks if chunk.spans}
        if plan is not None and plan.get("what") == what:
            for number, data in self._hear(plan, manifest.version, chunks):
                del missing[number]
                yield number, data
        self.pulled += len(missing)
        yield from self._downloads.get_all(manifest.version, list(missing.values()))

    def _hear(self, plan: Mapping[str, Any], version: int, chunks: Sequence[Chunk]) -> Iterator[tuple[int, Tensor]]:
        """The buckets that a round brings whole. It is received in a thread, which may be abandoned."""
        found: queue.Queue[tuple[int, Tensor] | None] = queue.Queue(2)
        threading.Thread(target=self._attend, args=(plan, version, chunks, found), name="round", daemon=True).start()
        with suppress(queue.Empty):
            while (item := found.get(timeout=2 * self._deadline)) is not None:
                yield item

    def _attend(
        self,
        plan: Mapping[str, Any],
        version: int,
        chunks: Sequence[Chunk],
        found: "queue.Queue[tuple[int, Tensor] | None]",
    ) -> None:
        group = None
        try:
            group = self._join(plan)
            for chunk in chunks:
                if (data := _receive(group, version, chunk)) is not None:
                    found.put((chunk.number, data), timeout=self._deadline)
        except (RuntimeError, ValueError, queue.Full) as error:
            log.warning("version %d was not broadcast to the end, the rest is pulled: %s", version, error)
            if group is not None:
                group.close()
            group = None
        self._group = group
        with suppress(queue.Full):
            found.put(None, timeout=self._deadline)

    def _join(self, plan: Mapping[str, Any]) -> BroadcastGroup:
        if self._group is not None and self._group.key == plan["key"]:
            return self._group
        if self._group is not None:
            self._group.close()
        if self._store is None:
            host, port = self._settings["store"]
            self._store = join_store(host, port, self._deadline)
        return BroadcastGroup.make(
            self._store,
            plan["key"],
            plan["rank"],
            plan["size"],
            backend=plan["backend"],
            deadline=self._deadline,
        )


def _receive(group: BroadcastGroup, version: int, chunk: Chunk) -> Tensor | None:
    """The bytes of a bucket; None if they are damaged, or the publisher has lost them."""
    header = group.receive(_HEADER, torch.int64).tolist()
    if header == _header(version, chunk, here=False).tolist():
        return None
    if header != (expected := _header(version, chunk, here=True).tolist()):
        raise ValueError(f"the next bucket must be {expected}, got {header}")
    if not chunk.bucket.bytes:
        return None
    data = group.receive(chunk.bucket.bytes)
    if not chunk.is_whole(data):
        return None
    return data.cpu() if chunk.kind == "delta" else data


def _header(version: int, chunk: Chunk, *, here: bool) -> Tensor:
    size = chunk.bucket.bytes if here else -1
    high, low = divmod(chunk.bucket.checksum, 2**32)
    return torch.tensor([version, chunk.number, size, high, low])


class _Line:
    """The connection by which the publisher knows a receiver: it ends with the receiver's process, if not before."""

    def __init__(self, source: str, secret: str, silence: float) -> None:
        url = urlsplit(source)
        self._connection = HTTPConnection(url.hostname or "", url.port, timeout=silence)
        self._headers = {"Authorization": f"Bearer {secret}"}

    def post(self, what: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer; None if there is none."""
        for _ in range(2):  # it may have ended since it was used last
            try:
                self._connection.request("POST", f"/{what}", json.dumps(body), self._headers)
                response = self._connection.getresponse()
                text = response.read()
                return json.loads(text) if response.status == 200 else None
            except (OSError, HTTPException):
                self._connection.close()
        return None

    def close(self) -> None:
        self._connection.close()
