"""Work beside a run: what hangs, fails or is too much never reaches who gave it."""

import threading
import time

from kitae.observe.side_thread import Aside


def test_work_is_done_in_order() -> None:
    done: list[int] = []
    said: list[str] = []
    aside = Aside("tracker", said.append)
    for i in range(50):
        aside.do(lambda i=i: done.append(i))  # type: ignore[misc]
    assert aside.close(10)
    assert done == list(range(50)) and said == []


def test_a_full_queue_drops_and_says_so_once() -> None:
    said: list[str] = []
    free, done = threading.Event(), []
    aside = Aside("tracker", said.append, most=3)
    aside.do(lambda: free.wait(30) and None)
    time.sleep(0.1)  # until its thread has taken that
    began = time.perf_counter()
    for i in range(100):
        aside.do(lambda i=i: done.append(i))  # type: ignore[misc]
    assert time.perf_counter() - began < 15
    free.set()
    assert aside.close(10)
    assert done == [0, 1, 2] and aside.dropped == 97
    assert said == [
        "tracker cannot keep up: what does not fit into its queue is dropped",
        "tracker: 97 pieces were dropped, 0 failed",
    ]


def test_failures_are_said_once_and_counted() -> None:
    said: list[str] = []
    done: list[int] = []
    aside = Aside("tracker", said.append)

    def fail() -> None:
        raise RuntimeError("no such server\nmore about it")

    def leave() -> None:
        raise SystemExit(3)

    for work in (fail, leave, fail, lambda: done.append(1)):
        aside.do(work)
    assert aside.close(10)
    assert done == [1]
    assert said == ["tracker failed: RuntimeError: no such server", "tracker: 0 pieces were dropped, 3 failed"]


def test_what_hangs_is_left_behind() -> None:
    said: list[str] = []
    free = threading.Event()
    aside = Aside("tracker", said.append, most=2)
    for _ in range(4):
        aside.do(lambda: free.wait(60) and None)
    began = time.perf_counter()
    assert not aside.close(0.3)
    assert time.perf_counter() - began < 30
    assert "tracker was left behind: it did not finish within 0.3 s" in said
    free.set()
