"""A checksum sees every value, and costs no more than reading them."""

import time

import torch
from torch import Tensor

from kitae.weights.layout import Checksum, raw


def checksum(*tensors: Tensor) -> int:
    found = Checksum()
    for tensor in tensors:
        found.add(raw(tensor))
    return found.value


def test_it_sees_values_and_order() -> None:
    a, b = torch.arange(5000.0), torch.arange(5000.0) + 1
    assert checksum(a, b) == checksum(a.clone(), b) != checksum(b, a)
    assert checksum(a[1:]) == checksum(a[1:].clone())
    changed = a.clone()
    changed[4999] += 1
    assert checksum(changed) != checksum(a)


def test_it_is_as_fast_as_memory() -> None:
    tensor = torch.zeros(2**26, dtype=torch.bfloat16)
    checksum(tensor)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        checksum(tensor)
        seconds.append(time.perf_counter() - began)
    assert tensor.nbytes / min(seconds) > 1e9
