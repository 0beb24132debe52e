"""A receiver in a process of its own, at the other end of a connection.

Messages are JSON. The first: {"address", "sizes": {name: bytes}, "die_after": buckets or null}. Each further one is a
manifest, and is answered with {"damaged", "sums", "pulled"}.
"""

import json
import os
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from kitae.weights.base import Address, Manifest
from kitae.weights.broadcast import BroadcastReceiver
from kitae.weights.publisher import checksum_of


def main(connection: Connection) -> None:
    torch.set_num_threads(1)
    setup = json.loads(connection.recv())
    parameters = {name: torch.zeros(size, dtype=torch.uint8) for name, size in setup["sizes"].items()}
    receiver = BroadcastReceiver.at(Address(**setup["address"]), parameters)
    image = receiver.reader.image

    def mortal(manifest: Manifest, wanted: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        for count, item in enumerate(image(manifest, wanted)):
            if count == setup["die_after"]:
                os._exit(9)
            yield item

    receiver.reader.image = mortal  # type: ignore[method-assign]
    connection.send(json.dumps({"ready": True}))
    while True:
        try:
            told = json.loads(connection.recv())
        except EOFError:
            break
        damaged = receiver.fetch(Manifest.of(told))
        sums = {name: checksum_of(tensor) for name, tensor in parameters.items()}
        connection.send(json.dumps({"damaged": damaged, "sums": sums, "pulled": receiver.pulled}))
    receiver.close()
