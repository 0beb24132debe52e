import os
import signal
import subprocess
import sys
import time

from kitae.workers.process_status import describe, family_of, processor_time, state_of


def becomes(state: str, pid: int) -> bool:
    deadline = time.monotonic() + 60
    while state_of(pid) != state and time.monotonic() < deadline:
        time.sleep(0.01)
    return state_of(pid) == state


def test_ends_in_words() -> None:
    assert describe(3 << 8) == "exit status 3"
    assert describe(signal.SIGKILL) == "killed by signal 9 (Killed)"
    assert describe(None) == "its template ended"


def test_a_process_and_its_descendants() -> None:
    program = "import subprocess, sys\np = subprocess.Popen(['sleep', '60'])\nprint(p.pid, flush=True)\np.wait()"
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        try:
            assert family_of(child.pid) == [child.pid, grandchild]
            assert becomes("S", grandchild)
            os.kill(grandchild, signal.SIGSTOP)
            assert becomes("T", grandchild)
        finally:
            os.kill(grandchild, signal.SIGKILL)
    assert state_of(child.pid) == "" and family_of(child.pid) == [child.pid] and processor_time(child.pid) == 0


def test_processor_time_is_that_of_the_process_itself() -> None:
    before = processor_time(os.getpid())
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert 0.04 < processor_time(os.getpid()) - before < 5
