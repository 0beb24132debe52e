"""A rank that stands still while others wait for it is named, and so is one that is slow."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks

from kitae.trainer.parallel import standing
from kitae.trainer.parallel.standing import Standing, hung, stragglers


def stuck(seconds: float) -> list[dict[str, Any]]:
    """What two ranks say of a thread each: that of rank 1 sleeps, that of rank 0 waits for it in a sum."""
    rank, control = dist.get_rank(), dist.new_group(backend="gloo")

    def compute() -> None:
        if rank:
            time.sleep(seconds)
        dist.all_reduce(torch.zeros(1))

    thread = threading.Thread(target=compute)
    thread.start()
    looks = Standing(thread.ident or 0)
    began = time.monotonic()
    while time.monotonic() - began < seconds / 2:
        state = looks.look()
        time.sleep(0.05)
    states: list[Any] = [None, None]
    dist.all_gather_object(states, state, group=control)
    thread.join()
    return states


def test_who_hangs_is_named_and_who_waits_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = on_ranks(tmp_path, stuck, 4.0)
    assert [state["meets"] for state in states] == [True, False]
    assert not hung(0, states) and not hung(1, states), "not yet"
    monkeypatch.setattr(standing, "HANGS", 0.5)
    assert not hung(0, states)
    assert "test_standing.py" in hung(1, states) and hung(1, states).endswith("while 1 others wait for it")
    assert not hung(1, [{**states[0], "meets": False}, states[1]]), "nobody waits: it works alone, as who writes a file"
    assert not hung(1, [states[0], {"work": 3}]), "it computes nothing"


def test_a_thread_that_goes_on_does_not_stand_still() -> None:
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            sum(range(20_000))
            max(range(20_000))

    thread = threading.Thread(target=work)
    thread.start()
    looks = Standing(thread.ident or 0)
    said = []
    for _ in range(60):
        time.sleep(0.02)
        said.append(looks.look())
    ended.set()
    thread.join()
    assert min(each["still"] for each in said[30:]) < 0.5 and said[-1]["work"] == 60
    assert Standing().look() == {"work": 0}


def test_stragglers() -> None:
    assert stragglers([0, 5, 0, 0], [20, 25, 21, 64]) == {3: pytest.approx(64 / 20.5)}
    assert stragglers([0, 0], [2, 9]) == {} == stragglers([0, 0, 0], [0, 0, 9]), "too few looks"
    assert stragglers([0] * 3, [40, 41, 55]) == {}
