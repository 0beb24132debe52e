"""The process of one rank: its shards of the models, and the driver's calls, one after the other.

The driver sends every call to all ranks in the same order, and each is computed before the next begins. So the ranks
meet in the same collective operations without any other agreement. A call that fails on one rank leaves the others
waiting for it: the driver ends them all.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitae.kernels.allocation import gc_frozen
from kitae.trainer.parallel.standing import Standing
from kitae.trainer.sample_wire import Arrays, Header, conditions_of, samples_of_wire, totals_to_wire
from kitae.workers.frames import Frame
from kitae.workers.serve import Call, Reply, Send, Served, serve

if TYPE_CHECKING:
    from kitae.config.root import Root
    from kitae.data.packing import Row
    from kitae.models.whole import Place
    from kitae.trainer.parallel.mesh import Mesh
    from kitae.trainer.training_worker import Worker
    from kitae.weights.transports import OwnPublisher

_PATIENCE = timedelta(minutes=30)  # of a collective operation: the slowest rank may be loading a model


def main(setup: dict[str, Any], stream: socket.socket) -> None:
    """Of a run of reinforcement learning, in a worker process (`kitae.workers.worker_main`)."""

    def make(config: "Root", mesh: "Mesh") -> "Worker":
        from kitae.config.root import reinforcement
        from kitae.trainer.build_worker import sharded_worker

        return sharded_worker(reinforcement(config, "a rank of a trainer"), mesh)

    run_rank(setup, stream, make)


def run_rank(setup: dict[str, Any], stream: socket.socket, make: "Callable[[Root, Mesh], Worker]") -> None:
    """make: what this rank has of the models, once it has met the others."""
    name = stream.getsockname()
    own = name[0] if isinstance(name, tuple) else ""

    async def rank(send: Send) -> Rank:
        return Rank(_join(setup, make, own), setup["rank"], own)

    serve(stream, rank, gc_frozen)


def _join(setup: dict[str, Any], make: "Callable[[Root, Mesh], Worker]", own: str) -> "Worker":
    """Meet the other ranks, and load and shard the models with them."""
    import warnings

    import torch

    from kitae.config.recipe import parse_config
    from kitae.models.load import pick_device
    from kitae.trainer.parallel.meeting import meet
    from kitae.trainer.parallel.mesh import Mesh, Parallel

    warnings.filterwarnings(
        "ignore", "FSDP2-wrapped module", UserWarning
    )  # layers return views; nothing writes to them
    config = parse_config(setup["config"])
    torch.set_num_threads(setup["threads"])
    device = pick_device(config.model.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    c = config.cluster
    meet(setup, c.collectives, device, own, _PATIENCE)
    mesh = Mesh(Parallel(c.ranks, c.tensor, c.sequence, c.expert, c.offload), device)
    return make(config, mesh)


class Rank(Served):
    """What the driver may ask of a worker: an operation for each call of `kitae.trainer.base.Trainer`."""

    def __init__(self, worker: "Worker", number: int, host: str) -> None:
        """host: the address of this machine that others can reach; "": they are on it."""
        import torch

        self.worker = worker
        self.number = number
        self._host = host
        self._publisher: OwnPublisher | None = None
        self._blocks: Mapping[str, Place] = {}  # that it publishes
        self._saving: Callable[[], None] = lambda: None
        self._saved_in = Path()
        self._standing = Standing()
        self._threads = torch.get_num_threads()  # a thread begins with as many as there are cores
        policy = worker.policy
        dtype = str(policy.dtype).removeprefix("torch.")
        self.greeting = {"device": policy.device.type, "dtype": dtype, "updates": worker.updates}
        self._computing = ThreadPoolExecutor(1, "kitae-trainer")
        self._writing = ThreadPoolExecutor(1, "kitae-trainer-saves")
        operations = (
            self._annotate, self._forward_backward, self._optim_step, self._finish_step, self._open_weight_store,
            self._publish, self._probe, self._begin_save, self._load, self._export,
        )  # fmt: skip
        self.ordered = {each.__name__[1:]: self._in_thread(each, self._computing) for each in operations}
        self.concurrent = {"end_save": self._in_thread(self._end_save, self._writing)}  # beside the next step

    def _in_thread(self, operation: Callable[[Header, Arrays], Reply], threads: ThreadPoolExecutor) -> Call:
        def compute(frame: Frame) -> Reply:
            import torch

            if torch.get_num_threads() != self._threads:
                torch.set_num_threads(self._threads)
            if threads is self._computing:
                self._standing.thread = threading.get_ident()
            try:
                return operation(frame.header, dict(frame.arrays))
            finally:
                if threads is self._computing:
                    self._standing.thread = 0

        async def call(frame: Frame) -> Reply:
            return await asyncio.get_running_loop().run_in_executor(threads, compute, frame)

        return call

    def status(self) -> dict[str, Any]:
        return self._standing.look()

    async def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _rows(self, header: Header, arrays: Arrays) -> "list[Row]":
        from kitae.data.packing import lay_out

        parts, observed = samples_of_wire(header, arrays)
        return [lay_out(part, not self.worker.policy.plain, observed) for part in parts]

    def _annotate(self, header: Header, arrays: Arrays) -> Reply:
        from kitae.trainer.base import Column

        rows = self._rows(header, arrays)
        found = self.worker.annotate(rows, [Column[name] for name in header["wanted"]])
        return {}, {f"{n}:{column.name}": v for column, values in found.items() for n, v in enumerate(values)}

    def _forward_backward(self, header: Header, arrays: Arrays) -> Reply:
        from kitae.trainer.base import Role

        rows, roles = self._rows(header, arrays), [Role[name] for name in header["roles"]]
        totals = self.worker.forward_backward(rows, conditions_of(header["conditions"]), roles)
        return totals_to_wire(totals) if self.number == 0 else ({}, {})

    def _optim_step(self, header: Header, arrays: Arrays) -> Reply:
        told, numbers = totals_to_wire(self.worker.optim_step())
        return {**told, "updates": self.worker.updates}, numbers

    def _finish_step(self, header: Header, arrays: Arrays) -> Reply:
        self.worker.finish_step(header["step"])
        return {}, {}

    def _open_weight_store(self, header: Header, arrays: Arrays) -> Reply:
        """Each rank publishes what it holds: a publisher on every rank."""
        from dataclasses import asdict

        from kitae.weights.from_shards import own_blocks, told
        from kitae.weights.transports import make_publisher

        settings = header["settings"]
        if self._host and "host" in settings:
            settings["host"] = self._host
        if settings.get("folder"):
            settings["folder"] = str(Path(settings["folder"]) / f"rank-{self.number}")
        self._publisher = make_publisher(header["transport"], header["mode"], **settings)
        weights = self.worker.weights()
        self._blocks = own_blocks(weights, self.worker.ranks)
        return {"address": asdict(self._publisher.address), "blocks": told(self._blocks, weights)}, {}

    def _publish(self, header: Header, arrays: Arrays) -> Reply:
        from kitae.trainer.collective_ops import local

        assert self._publisher is not None
        weights = self.worker.weights()
        blocks = {name: local(weights[name]) for name in self._blocks}
        manifest = self._publisher.publish(header["version"], blocks, in_full=header["in_full"])
        return {"manifest": manifest.record()}, {}

    def _probe(self, header: Header, arrays: Arrays) -> Reply:
        from kitae.weights.probe import score_probe

        return {"logprobs": score_probe(self.worker.policy)}, {}

    def _begin_save(self, header: Header, arrays: Arrays) -> Reply:
        """Returns when the state is copied."""
        self._saving, self._saved_in = self.worker.begin_save(Path(header["folder"])), Path(header["folder"])
        return {}, {}

    def _end_save(self, header: Header, arrays: Arrays) -> Reply:
        """Each rank sums up what it has written."""
        from kitae.store.sealed import leave_seal
        from kitae.trainer.training_worker import files_of_rank

        self._saving()
        for path in files_of_rank(self._saved_in, self.number):
            leave_seal(path)
        return {}, {}

    def _load(self, header: Header, arrays: Arrays) -> Reply:
        self.worker.load(Path(header["folder"]))
        return {"updates": self.worker.updates}, {}

    def _export(self, header: Header, arrays: Arrays) -> Reply:
        self.worker.export(Path(header["folder"]))
        return {}, {}
