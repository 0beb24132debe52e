"""Python that remembers, in a sandbox."""

import shutil
import time

import pytest

from kitae.sandbox.python_console import PythonConsole
from kitae.sandbox.sandbox_jobs import Limits

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture
def console():
    with PythonConsole("auto", Limits(time_limit=1.0, memory_mb=256, output_mb=1)) as made:
        yield made


def said(console, code):
    report = console.run(code)
    assert report.status == "ended", report
    return report.output.decode()


def test_names_stay_and_the_last_line_is_shown(console):
    assert said(console, "x = 6 * 7\ndef f(n): return n + x") == ""
    assert said(console, "print('hi')\nf(1)") == "hi\n43\n"
    assert said(console, "_ + 1") == "44\n"
    assert said(console, "None") == ""


def test_exceptions_are_part_of_what_is_said(console):
    text = said(console, "y = 5\n1/0")
    assert "ZeroDivisionError" in text and "<cell>" in text and "kitae" not in text and "inside" not in text
    assert "SyntaxError" in said(console, "def f(:") and said(console, "y") == "5\n"
    assert said(console, "import sys; sys.exit(3)") == "" and said(console, "y") == "5\n"


@pytest.mark.parametrize(
    ("code", "status", "detail"),
    [
        ("while True: pass", "timeout", "more than 1 s"),
        ("import time; time.sleep(60)", "timeout", "more than 1 s"),
        ("while True: print('y' * 1000)", "timeout", "more than 1 s"),
        ("import os; os._exit(3)", "crashed", "exit status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "crashed", "killed by signal 9"),
        ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", "", ""),
    ],
)
def test_a_cell_that_breaks_a_limit_costs_the_memory_and_nothing_else(console, code, status, detail):
    said(console, "x = 1")
    report = console.run(code)
    assert report.status in ((status,) if status else ("timeout", "crashed")) and detail in report.detail
    assert len(report.output) <= 2**20
    assert "NameError" in said(console, "x")


def test_memory_and_files_are_limited(console):
    assert "MemoryError" in said(console, "a = [bytearray(10**8) for _ in range(9)]")
    assert "FileNotFoundError" in said(console, "open('/etc/passwd')")
    assert said(console, "open('note', 'w').write('kept')") == "4\n"
    assert said(console, "open('note').read()") == "'kept'\n"


def test_odd_output(console):
    assert said(console, "print('\\ud800')") == "\\ud800\n"
    assert console.run("import os; n = os.write(1, bytes(range(256)))").output == bytes(range(256))
    said(console, "import sys; sys.stdout.close()")
    assert said(console, "print(1)") == "1\n"


def test_what_a_cell_writes_on_the_line_means_nothing(console):
    for number in range(3):
        assert said(console, f"import os; n = os.write(3, b'x' * 100)\n{number}") == f"{number}\n"
        assert said(console, "6") == "6\n"


def test_what_is_left_running_stands_still_between_cells(console):
    said(
        console,
        "import threading\ncount = 0\ndef g():\n  global count\n  while True: count += 1\n"
        "threading.Thread(target=g, daemon=True).start()",
    )
    first, then = said(console, "import time; time.process_time()"), time.monotonic()
    time.sleep(1.0)
    used = float(said(console, "time.process_time()")) - float(first)
    assert used < 0.7 * (time.monotonic() - then)
