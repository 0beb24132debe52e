"""What servers read: a published version as the folder of an ordinary model, under the names they know.

A trainer publishes what it trains, under its own names: parameters, or the adapters of LoRA. A server knows the names
of a checkpoint. Between the two stands a copy of the model in host memory: it fetches a version as any engine does,
with checksums, and is written out with adapters merged and tied heads once. It also gives the log-probs of the probe
that a server with these weights must give.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from torch import Tensor

from kitae.engines.servers.tensor_files import WEIGHTS, write_tensors
from kitae.errors import EngineError, WeightsDamaged
from kitae.models.lora import merged_state
from kitae.models.policy import Policy
from kitae.models.written_folder import export_policy
from kitae.weights.base import Address, Manifest
from kitae.weights.probe import Probe, score_probe
from kitae.weights.transports import make_receiver

_SHARED = Path("/dev/shm")  # memory with the names of files
_ROOM = 3  # times the model: what it was started from, the version that is served, the next
_CARETAKER = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"


class WeightsFolder:
    """`close` it when done: then the folder is gone. Its methods take seconds, and are for a thread.

    copy: a model of its own, which nobody else uses. address: where versions are published. root: a folder that the
    servers can read too; "": memory of this machine, or its temporary folder where that is too small.
    """

    def __init__(self, copy: Policy, address: Address, version: int, root: str = "") -> None:
        self.root = Path(tempfile.mkdtemp(prefix="kitae-", dir=root or _roomy(copy)))
        os.chmod(self.root, 0o755)  # a server may run as somebody else
        # It outlives a killed trainer by a moment, and leaves nothing behind: shared memory has no other owner.
        self._caretaker = subprocess.Popen(
            [sys.executable, "-c", _CARETAKER, str(self.root)], stdin=subprocess.PIPE, start_new_session=True
        )
        self.start = self.root / "start"
        self.packages = self.root / "packages"
        self._copy = copy
        self._receiver = make_receiver(address, dict(copy.model.named_parameters()))
        self._manifest: Manifest | None = None
        self._turn = 0
        self._taking = threading.Lock()
        self._export()
        self.current = self.start
        self.probe = Probe(version, score_probe(copy))

    def _export(self) -> None:
        export_policy(self._copy, self.start)
        for path in self.start.glob("*.safetensors*"):
            path.unlink()
        write_tensors(self.start, checkpoint(self._copy))
        self.packages.mkdir()
        (self.packages / "kitae").symlink_to(Path(__file__).parents[2])  # Kitae alone, not what lies beside it

    def take(self, manifest: Manifest) -> int:
        """Have `current` hold this version; the number of buckets that had to be loaded twice for this. `EngineError`:
        it does not fit, nothing was changed; `WeightsDamaged`: it did not arrive whole. Several may ask for the same at
        a time."""
        with self._taking:
            before = self._receiver.repaired
            if manifest != self._manifest:
                self._take(manifest)
            return self._receiver.repaired - before

    def _take(self, manifest: Manifest) -> None:
        damaged = self._receiver.fetch(manifest)
        self._manifest = None
        if damaged:
            raise WeightsDamaged(
                f"version {manifest.version} did not arrive whole: damaged are {len(damaged)} of "
                f"{len(manifest.buckets)} buckets"
            )
        self._turn = 1 - self._turn
        folder = self.root / "ab"[self._turn]
        try:
            self._furnish(folder)
            write_tensors(folder, checkpoint(self._copy))
        except OSError as error:
            raise EngineError(f"version {manifest.version} cannot be written for servers: {error}") from error
        self.current, self._manifest = folder, manifest
        self.probe = Probe(manifest.version, score_probe(self._copy))

    def _furnish(self, folder: Path) -> None:
        """All that a model's folder has beside its weights."""
        folder.mkdir(exist_ok=True)
        for path in filter(Path.is_file, self.start.iterdir()):
            if path.name != WEIGHTS and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)

    def close(self) -> None:
        self._receiver.close()
        assert self._caretaker.stdin is not None
        self._caretaker.stdin.close()
        self._caretaker.wait()


def checkpoint(policy: Policy) -> dict[str, Tensor]:
    """The parameters of the plain model by name, adapters merged; a tied head is not there a second time."""
    names = {name.replace(".base_layer.", ".") for name, _ in policy.base.named_parameters() if "lora_" not in name}
    return {name: tensor for name, tensor in merged_state(policy).items() if name in names}


def _roomy(policy: Policy) -> str | None:
    """Shared memory if there is enough of it."""
    needed = _ROOM * sum(p.nbytes for p in policy.model.parameters())
    if not _SHARED.is_dir() or not os.access(_SHARED, os.W_OK):
        return None
    return str(_SHARED) if shutil.disk_usage(_SHARED).free > 2 * needed else None
