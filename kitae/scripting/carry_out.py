"""Orders from Python carried out: functions held, rows written, and no event loop in the way."""

import asyncio
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kitae.config.root import RLConfig, reinforcement
from kitae.errors import ConfigError, Interrupted
from kitae.observe.observer import Audience
from kitae.run import train_run
from kitae.run.hand_over import NOBODY, HandOver
from kitae.run.interrupts import give_up, stop_elsewhere
from kitae.scripting.given_rewards import Reward, given_again
from kitae.scripting.run_order import RunOrder
from kitae.store.run_folder import Result, read_config
from kitae.verifiers.given_functions import SESSION, GivenFunction, held
from kitae.workers.templates.template import IN_TEMPLATE

T = TypeVar("T")


def refuse_in_workers() -> None:
    """A worker that loads a function from its file executes the file: a run that is started there has no end."""
    if os.environ.get(IN_TEMPLATE):
        raise ConfigError(
            "a run was started while a worker loaded the file of its reward: put the call under "
            'if __name__ == "__main__":'
        )


def train_order(order: RunOrder, audience: Audience, hands: HandOver = NOBODY) -> Result:
    with held(order.functions):
        if order.rows:
            return train_run.train_placed(order.config, order.placed, audience, hands)
        return train_run.train(order.config, audience, hands)


def work_on(order: RunOrder, work: Callable[[RLConfig], T]) -> T:
    """What `work` makes of the settings, with rows in a folder that is there meanwhile, and functions held."""

    def all_of_it() -> T:
        with tempfile.TemporaryDirectory(prefix="kitae-rows-") as folder, held(order.functions):
            return work(reinforcement(order.placed(Path(folder)), "this"))

    return outside_a_loop(all_of_it)


def resume_with(folder: Path, reward: Reward | Sequence[Reward] | None, work: Callable[[], Result]) -> Result:
    """Go on with a run whose functions are given again, if any are."""
    functions: tuple[GivenFunction, ...] = ()
    if reward is not None:
        config = read_config(folder)
        if not isinstance(config, RLConfig):
            raise ConfigError(f"reward is for reinforcement learning, got it with method {config.method.kind!r}")
        functions = given_again(config.verifier.name, config.verifier.params, reward)

    def all_of_it() -> Result:
        with held(functions):
            return work()

    return ended(outside_a_loop(all_of_it), functions)


def ended(result: Result, functions: Sequence[GivenFunction] = ()) -> Result:
    """A run that came to its end; one that was stopped raises `Interrupted`, which says how to go on."""
    if result.stopped_by is None:
        return result
    raise interrupted(result, functions)


def interrupted(result: Result, functions: Sequence[GivenFunction] = ()) -> Interrupted:
    again = f"kitae resume {result.folder}"
    if lost := [each.name.label for each in functions if each.name.where == SESSION]:  # no file has them
        again = f'kitae.resume("{result.folder}", reward={lost[0] if len(functions) == 1 else "[…]"})'
    said = f"stopped after step {result.step}; everything is saved. Go on with:\n    {again}"
    return Interrupted(said, result.stopped_by or signal.SIGINT)


def outside_a_loop(work: Callable[[], T]) -> T:
    """What `work` returns or raises. Where an event loop is running, it is called in another thread.

    Ctrl-C then stops a run at its next safe point, like elsewhere; a second one gives up waiting for that.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    done: Future[T] = Future()

    def call() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=call, name="kitae-run", daemon=True)
    with _stopping_by_signal():
        thread.start()
        try:
            return done.result()
        except KeyboardInterrupt:
            give_up(thread.ident)
            raise


@contextmanager
def _stopping_by_signal() -> Iterator[None]:
    """While the main thread waits for another: Ctrl-C stops what runs there; if nothing does, or again, it raises."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def interrupted(number: int, frame: object) -> None:
        nonlocal asked
        if asked or not stop_elsewhere(number):
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
