"""A receiver in a process of its own: `python broadcast_member.py`, then JSON lines by stdin.

The first line: {"address", "sizes": {name: bytes}, "die_after": buckets or null}. Each further one is a manifest, and
is answered with {"damaged", "sums", "pulled"}.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kitae.weights.base import Address, Manifest
from kitae.weights.broadcast import BroadcastReceiver
from kitae.weights.publisher import checksum_of


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    parameters = {name: torch.zeros(size, dtype=torch.uint8) for name, size in setup["sizes"].items()}
    receiver = BroadcastReceiver.at(Address(**setup["address"]), parameters)
    image = receiver.reader.image

    def mortal(manifest: Manifest, wanted: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        for count, item in enumerate(image(manifest, wanted)):
            if count == setup["die_after"]:
                os._exit(9)
            yield item

    receiver.reader.image = mortal  # type: ignore[method-assign]
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        damaged = receiver.fetch(Manifest.of(json.loads(line)))
        sums = {name: checksum_of(tensor) for name, tensor in parameters.items()}
        print(json.dumps({"damaged": damaged, "sums": sums, "pulled": receiver.pulled}), flush=True)
    receiver.close()


if __name__ == "__main__":
    main()
