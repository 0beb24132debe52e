"""Which runs have changed: written to, new, gone, or without their process."""

import asyncio
import shutil
from pathlib import Path

from written_runs import WrittenRun

from kitae.store.run_folder import lock
from kitae.store.run_summary import look
from kitae.ui.library import Library
from kitae.ui.ui_server import RunWatcher, change_events


def test_a_watcher_names_runs_that_look_otherwise(tmp_path: Path) -> None:
    done, running = WrittenRun(tmp_path, "done").finish(), WrittenRun(tmp_path, "runs")
    watcher = RunWatcher(Library([tmp_path]))
    assert watcher.changed() == []
    running.step([[1.0]])
    assert watcher.changed() == ["runs-001"]
    running.store._lock.close()  # as when its process is killed: nothing is written
    assert watcher.changed() == ["runs-001"]
    assert watcher.changed() == []
    new = WrittenRun(tmp_path, "new")
    shutil.rmtree(done)
    assert watcher.changed() == ["done-001", "new-001"]
    for run in (running, new):
        run.close()


def test_news_are_events_of_the_server(tmp_path: Path) -> None:
    made = WrittenRun(tmp_path)

    async def listen() -> list[str]:
        found, messages = [], change_events(Library([tmp_path]), every=0.01)
        async for message in messages:
            found.append(message)
            if len(found) == 1:
                await asyncio.to_thread(made.step, [[1.0]])
            else:
                break
        await messages.aclose()  # type: ignore[attr-defined]
        return found

    assert asyncio.run(listen()) == ["retry: 2000\n\n", 'data: {"runs": ["toy-001"]}\n\n']
    made.close()


def test_who_looks_on_keeps_no_run_from_starting(tmp_path: Path) -> None:
    """A look at the lock takes it for an instant; whoever wants it then must not be refused."""
    import threading

    run, stop = WrittenRun(tmp_path).finish(), threading.Event()

    def keep_looking() -> None:
        while not stop.is_set():
            assert look(run).status in ("finished", "running")

    looking = threading.Thread(target=keep_looking)
    looking.start()
    try:
        for _ in range(50):
            lock(run).close()
    finally:
        stop.set()
        looking.join()
