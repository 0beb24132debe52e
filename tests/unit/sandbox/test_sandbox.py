"""The sandbox itself: which one is chosen, what it is started with, how a session behaves."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kitae.errors import KitaeWarning, SandboxError
from kitae.sandbox import backends
from kitae.sandbox import session as session_module
from kitae.sandbox.backends import Backend, find_program
from kitae.sandbox.inside.usage import Usage
from kitae.sandbox.sandbox_jobs import Limits, Order
from kitae.sandbox.session import Report, find_backend, open_session
from kitae.verifiers.code.code_verifier import code

needs_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
unprotected = pytest.mark.filterwarnings("ignore::kitae.errors.KitaeWarning")
ASSERTS = {"kind": "asserts", "asserts": ["assert f(1) == 2"]}
RIGHT = "def f(x): return x + 1"


def run_python(source: str) -> Order:
    return {"mode": "run", "variants": [source], "files": {}, "compile": None, "command": None}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Sandboxes are chosen once per process: here they are chosen anew, and that is forgotten afterwards."""
    find_backend.cache_clear()
    yield monkeypatch
    find_backend.cache_clear()


def test_without_a_sandbox_code_is_refused_with_the_install_command(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(session_module.shutil, "which", lambda *_, **__: None)
    with pytest.raises(SandboxError, match="apt-get install bubblewrap") as refusal:
        find_backend("auto")
    assert "bwrap is not installed; unshare is not installed" in str(refusal.value)
    score = code(RIGHT, ASSERTS, {})
    assert score.outcome == "error" and "apt-get install bubblewrap" in score.detail


def test_a_sandbox_that_does_not_work_is_refused_with_its_reason(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    fresh.setattr(session_module.shutil, "which", lambda name, **_: str(broken) if name == "bwrap" else None)
    with pytest.raises(SandboxError, match="bwrap does not work here: No permissions to create new namespace"):
        find_backend("auto")


@needs_sandbox
def test_a_program_that_isolates_nothing_is_refused(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It runs the code, but not as user 65534."""
    fake = tmp_path / "bwrap"
    fake.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n')
    fake.chmod(0o755)
    fresh.setattr(session_module.shutil, "which", lambda name, **_: str(fake) if name == "bwrap" else None)
    fresh.setattr(backends.os, "geteuid", lambda: 1000)  # or root would become 65534 all the same
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "mine").write_text("x")
    fresh.chdir(folder)
    with pytest.raises(SandboxError, match="bwrap does not work here"):
        find_backend("auto")
    assert [path.name for path in folder.iterdir()] == ["mine"]  # it cleans up where it is alone, and nowhere else


def test_unknown_choice_is_refused() -> None:
    with pytest.raises(SandboxError, match="auto, bwrap, unshare, none, got 'docker'"):
        find_backend("docker")  # type: ignore[arg-type]


def test_none_warns_at_every_start(fresh: pytest.MonkeyPatch) -> None:
    with pytest.warns(KitaeWarning, match="with your rights"):
        assert code(RIGHT, ASSERTS, {}, sandbox="none").value == 1
    code(RIGHT, ASSERTS, {}, sandbox="none")  # once per process: a second warning would fail the test
    find_backend.cache_clear()  # another process
    with pytest.warns(KitaeWarning, match="with your rights"):
        code(RIGHT, ASSERTS, {}, sandbox="none")


@unprotected
def test_none_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module.tempfile, "tempdir", str(tmp_path))
    source = "open('left', 'w').write('x')\nprint(3)"
    assert code(source, {"kind": "stdio", "cases": [{"stdin": "", "stdout": "3"}]}, {}, sandbox="none").value == 1
    assert list(tmp_path.iterdir()) == []


@unprotected
def test_none_kills_the_group_and_nothing_else() -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        source = "import subprocess\nsubprocess.Popen(['sleep', '61'])\nprint(3, flush=True)\nwhile True: pass"
        reference = {"kind": "stdio", "cases": [{"stdin": "", "stdout": "3"}]}
        assert code(source, reference, {}, sandbox="none", time_limit=0.3).value == 0
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@needs_sandbox
@pytest.mark.parametrize("choice", ["bwrap", "unshare"])
def test_both_sandboxes_isolate(choice: Any, tmp_path: Path) -> None:
    try:
        find_backend(choice)
    except SandboxError as problem:
        pytest.skip(str(problem))
    (tmp_path / "secret").write_text("x")
    checks = {
        "os.getuid() == os.getgid() == 65534": True,
        "os.listdir('/proc/1/fd')": "PermissionError",
        f"os.path.exists({str(tmp_path)!r})": False,
        "os.path.exists('/etc/passwd')": False,
        "open('/usr/x', 'w')": "OSError",
        "open('/x', 'w')": "OSError",
        "os.setuid(0)": "OSError",
        "[line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line]": ["lo"],
        "sorted(n for n in os.listdir('/proc') if n.isdigit())[0]": "1",
        "'NoNewPrivs:\\t1' in open('/proc/self/status').read()": True,
        "open('/box/a', 'w').write('ab') + open('/tmp/a', 'w').write('cd')": 4,
    }
    source = """
import os
def f(expression):
    try:
        return eval(expression)
    except OSError as error:
        return [c.__name__ for c in type(error).__mro__]
"""
    asserts = [
        f"got = f({expression!r})\nassert got == {want!r} or (type(got) is list and {want!r} in got), got"
        for expression, want in checks.items()
    ]
    score = code(source, {"kind": "asserts", "asserts": asserts}, {}, sandbox=choice)
    assert (score.value, score.detail) == (1, "")


@needs_sandbox
def test_bwrap_is_told_to_cut_everything_off() -> None:
    backend = find_backend("bwrap")
    words = backend.command(Limits(), ["/home/me/py/lib"], None, 9)
    for word in ("--new-session", "--die-with-parent", "--as-pid-1", "--clearenv", "--seccomp", "--remount-ro"):
        assert word in words
    assert words[words.index("--cap-drop") + 1] == "ALL"
    bound = {words[i + 1] for i, word in enumerate(words) if word in ("--ro-bind", "--ro-bind-try", "--bind")}
    assert bound <= {"/home/me/py/lib", *backends._SYSTEM, *backends._SETTINGS, *map(str, Path("/etc").glob("java-*"))}
    assert "--bind" not in words and "--share-net" not in words


def test_no_virtual_environment_is_handed_in() -> None:
    folders = backends.python_folders()
    assert not any(folder.startswith(sys.prefix + "/") for folder in folders) or sys.prefix == sys.base_prefix
    assert str(Path.home()) not in folders and "/" not in folders


@pytest.mark.parametrize("root", [True, False])
def test_users_get_a_namespace_of_their_own(root: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.os, "geteuid", lambda: 0 if root else 1000)
    words = Backend("bwrap", "bwrap", "--size --disable-userns").command(Limits(), [], 7 if root else None, None)
    if root:
        assert words[words.index("--userns") + 1] == "7"
        assert {"--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"} <= set(words)
    else:
        assert {"--unshare-all", "--disable-userns"} <= set(words)
        assert words[words.index("--uid") + 1] == words[words.index("--gid") + 1] == "65534"


@needs_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="only root shares a user namespace between sandboxes")
def test_a_fork_makes_a_namespace_of_its_own() -> None:
    """Workers of a pool are forks of a process that has already run a check."""
    code(RIGHT, ASSERTS, {})
    mine = os.fstat(backends.user_namespace(os.getpid()) or 0).st_ino
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            value = code(RIGHT, ASSERTS, {}).value
            os.write(write, f"{value} {os.fstat(backends.user_namespace(os.getpid()) or 0).st_ino}".encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    value, theirs = os.read(read, 100).split()
    assert value == b"1.0"
    assert int(theirs) != mine


@needs_sandbox
def test_a_bomb_next_door_does_not_starve_honest_threads() -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    program = f"from kitae.verifiers.code.code_verifier import code\ncode({bomb!r}, {ASSERTS!r}, {{}}, time_limit=2.0)"
    honest = (
        "import threading\ndef f(x):\n    ts = [threading.Thread(target=lambda: None) for _ in range(20)]\n"
        "    [t.start() for t in ts]; [t.join() for t in ts]\n    return x + 1"
    )
    neighbour = subprocess.Popen([sys.executable, "-c", program])
    try:
        time.sleep(1.0)
        for _ in range(5):
            score = code(honest, ASSERTS, {}, time_limit=20.0)
            assert (score.value, score.detail) == (1, "")
    finally:
        neighbour.kill()
        neighbour.wait()


@needs_sandbox
def test_session_reports_in_order_and_says_when_it_has_ended() -> None:
    with open_session("auto", run_python("print(int(input()) * 2)"), Limits()) as session:
        assert [session.receive(10), session.receive(10)] == [Report("ready", "", b""), Report("loaded", "", b"")]
        for number in (1, 21):
            session.send(str(number).encode())
            assert session.receive(10) == Report("ended", "", f"{2 * number}\n".encode())
        assert session.receive(0.05) is None
        for pid in session_module._children(session._process.pid):
            os.kill(pid, 9)
        with pytest.raises(EOFError):
            session.receive(5)
        with pytest.raises(EOFError):
            for _ in range(100):
                session.send(b"x" * 2**16)


@needs_sandbox
@pytest.mark.parametrize("choice", ["bwrap", "unshare"])
@pytest.mark.parametrize("how", ["close", "desert"])
def test_nothing_outlives_its_session(choice: Any, how: str) -> None:
    """Even a program that hangs, and even where we vanish without a word, which closes our pipes and no more."""
    try:
        find_backend(choice)
    except SandboxError as problem:
        pytest.skip(str(problem))
    session = open_session(choice, run_python("while True: pass"), Limits(time_limit=60))
    assert session.receive(10) and session.receive(10)
    session.send(b"")
    time.sleep(0.3)
    inside = session_module._children(session._process.pid)
    assert inside
    if how == "desert":
        assert session._process.stdin is not None
        session._process.stdin.close()
    else:
        session.close()
    deadline = time.monotonic() + 60
    while any(_alive(pid) for pid in inside) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_alive(pid) for pid in inside)
    session.close()


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@needs_sandbox
def test_large_input_and_output_pass_through() -> None:
    text = "x" * (3 * 2**20)
    with open_session("auto", run_python("print(input())"), Limits()) as session:
        assert session.receive(10) and session.receive(10)
        session.send(text.encode())
        report = session.receive(10)
    assert report is not None and report.output == text.encode() + b"\n"


@needs_sandbox
def test_output_is_cut_off() -> None:
    order = run_python("while True: print('x' * 10**6)")
    with open_session("auto", order, Limits(output_mb=2)) as session:
        assert session.receive(10) and session.receive(10)
        session.send(b"")
        report = session.receive(10)
    assert report is not None and report.status == "output" and len(report.output) < 4 * 2**20


@needs_sandbox
def test_threads_may_open_sessions_side_by_side() -> None:
    values: list[float] = []
    threads = [threading.Thread(target=lambda: values.append(code(RIGHT, ASSERTS, {}).value)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [1.0] * 6


@needs_sandbox
def test_no_descriptor_and_no_process_is_left() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")  # other tests may have left some
    code(RIGHT, ASSERTS, {})
    before, descriptors = children.read_text(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        code(RIGHT, ASSERTS, {})
        code("def f(x): raise SystemExit", ASSERTS, {})
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert children.read_text() == before


def test_find_program_looks_where_a_sandbox_has_something() -> None:
    assert find_program("sh") is not None
    assert find_program("no-such-program") is None


def test_processor_time_of_children_counts() -> None:
    busy = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    program = (
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-S', '-c', {busy!r}])\nprint(flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        usage = Usage(child.pid, 1024, 1000)
        child.stdout.readline()
        assert usage.look() == "" and usage.seconds >= 0.3
        usage.restart()
        assert usage.seconds == 0
        assert "more than 0 MiB of memory" in Usage(child.pid, 0, 1000).look()
        child.stdin.close()
