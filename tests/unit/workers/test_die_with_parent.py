import os
import signal
import subprocess
import sys
import time

from kitae.workers.die_with_parent import tethered
from kitae.workers.process_status import family_of

ESCAPES = (
    "import subprocess, time; subprocess.Popen(['sleep', '991'], start_new_session=True); print('up', flush=True); "
    "time.sleep(990)"
)


def gone(pids):
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_streams_and_status_are_the_programs():
    command = tethered([sys.executable, "-c", "import sys; print(input()[::-1]); sys.exit(7)"])
    done = subprocess.run(command, input="abc\n", capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("cba\n", 7)


def test_all_end_when_the_parent_is_killed():
    boot = f"import subprocess, time; subprocess.Popen({tethered([sys.executable, '-c', ESCAPES])!r}); time.sleep(989)"
    parent = subprocess.Popen([sys.executable, "-c", boot], stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
    below = family_of(parent.pid)[1:]
    assert len(below) == 3  # the tether, the program, and what it has started
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(below)


def test_what_a_program_leaves_behind_ends_with_it():
    program = subprocess.Popen(tethered([sys.executable, "-c", ESCAPES]), stdout=subprocess.PIPE)
    assert program.stdout is not None and program.stdout.readline() == b"up\n"
    below = family_of(program.pid)[1:]
    os.kill(below[0], signal.SIGKILL)
    program.wait(10)
    program.stdout.close()
    assert gone(below)


TIDIES = (
    "import pathlib, signal, sys, time; path = pathlib.Path(sys.argv[1]); path.write_text('left'); "
    "signal.signal(signal.SIGTERM, lambda *_: (path.unlink(), sys.exit())); print('up', flush=True); time.sleep(990)"
)


def test_a_program_with_a_grace_can_tidy_up(tmp_path):
    for grace, left in ((10.0, False), (0.0, True)):
        path = tmp_path / str(grace)
        command = tethered([sys.executable, "-c", TIDIES, str(path)], grace)
        program = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert program.stdout is not None and program.stdout.readline() == b"up\n"
        below = family_of(program.pid)[1:]
        program.terminate()
        program.wait(10)
        program.stdout.close()
        assert gone(below) and path.exists() == left
