"""The engine's own queue on a GPU, so that sampling and training share the device instead of taking turns.

Kernels of one queue run in order. In the trainer's, a decoding step of a few milliseconds would wait until a whole
backward pass has been computed; in a queue of its own, and with precedence, it runs beside that. Nobody needs to wait
for the other but around a change of the weights, when the engine stands still: it is done with the old ones before
`pause` returns, and takes no step before the new ones are there.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Lane:
    """Of one device; on a CPU it does nothing. Used by the engine's thread alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        make: Any = torch.cuda.Stream
        self._stream = make(device, priority=-1) if device.type == "cuda" else None

    def entered(self) -> AbstractContextManager[Any]:
        """What is launched inside goes into the lane."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def left(self) -> AbstractContextManager[Any]:
        """What is allocated inside belongs to everybody: the trainer may have its memory afterwards."""
        if self._stream is None:
            return nullcontext()
        return torch.cuda.stream(torch.cuda.default_stream(self._device))

    def follow(self) -> None:
        """What is launched from now on waits for all that others have launched."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self._device))

    def drain(self) -> None:
        """Return when nothing of it is left on the device."""
        if self._stream is not None:
            self._stream.synchronize()
