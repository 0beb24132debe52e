"""The tests' side: runs the tests, which reach the candidate only by requests whose answers are plain data.

The rule: tests, their setup and what they expect are in this process, where the candidate cannot reach them. What
crosses the connection is data of a closed set of types, by value, and built here from types of this side. An object
that is not data is a `Remote`. It can be called, read, iterated and passed back, but it equals nothing that the tests
have, and an operator other than a product or a power takes a value of the tests only where they have made the object
of a class that they name: otherwise an object of the candidate would be shown the expected value and asked whether it
is right. Whatever the candidate sends that is not an answer fails the test that made the request, and is never an
error: errors are for tests that nobody could pass here.

What holds in the candidate's process holds here: identity, hashes and equality among the candidate's own objects,
isinstance and issubclass among its own classes, copies, docstrings, signatures (without annotations), generators,
exceptions with their attributes, causes and bases. What the tests do to a list, dict or set that an object has handed
out is sent to it before the next request, for the last 8 answers of up to 1000 items. random.seed and a redirected
sys.stdout or sys.stdin apply to calls of the candidate as well. Changes that a call makes to its arguments are visible
from the next statement of the tests on, so that `assert f(xs) == sorted(xs)` sorts what f was given, and not what f has
made of it.

What cannot pass: an exception that a context manager of the candidate suppresses; an assertion that fails and is caught
by anything but the tests' own text (`Failures`), be it a function that the tests passed to the candidate, a thread, a
future, a process, a test case or a handler of a log; SystemExit; an exception that ends a loop of the tests early
(`CheckerPort._escaped`, `whole`); an object with fewer items than its length (`Lengths`); text of the candidate that is
run here (`Guard`).

Not covered: a test that derives a class from the candidate's (an error), `type(x) is C`, dataclasses.asdict and others
that look at the type of an object, a list of an object that the candidate changes after it was handed out, attributes
set on its modules, mock.patch of what the candidate calls, objects of libraries as arguments, output of generators, the
state of random after the candidate has used it.
"""

from __future__ import annotations

import builtins
import sys

from kitae.sandbox.inside.port import TESTS, CheckerPort, Gone, TimeUp, is_own
from kitae.sandbox.inside.precautions import attend, whole
from kitae.sandbox.inside.wire import NotData, describe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from kitae.sandbox.inside.usage import Usage
    from kitae.sandbox.sandbox_jobs import Job


UNUSED = "unused"


def check(fd: int, usage: Usage, job: Job, report: Callable[[str, str], None]) -> None:
    """Wait for the candidate to load, then run `job["tests"]` one by one and report on each as it ends.

    Reports: "loaded" or "unloadable" once; then "passed" or "failed" for each test. "timeout" and "gone" end it all:
    the test that was running has failed, and those after it have not been run. "error": the tests are at fault.
    "unsure": they failed before they reached the candidate; so they are at fault, or it has done something to the files
    and limits that both have. The detail `UNUSED`: a test has passed, and none has reached the candidate yet.
    """
    port = CheckerPort(fd, usage, job["time_limit"])
    try:
        port.restart_clock()
        status, rest = port.trust(port.receive_loaded)
    except (TimeUp, Gone) as end:
        report("timeout" if isinstance(end, TimeUp) else "unloadable", str(end))
        return
    if status != "loaded":
        report("unloadable", rest)
        return
    port.common = set(rest)
    report("loaded", "")
    texts = [job["prompt"], job["setup"], *job["tests"]]
    namespace: dict[str, Any] = {}
    for test in (None, *job["tests"]):
        port.restart_clock()
        status, detail = "passed", ""
        try:
            if test is None:
                namespace = make_namespace(port, job, texts)
                continue
            exec(compile(test, "tests", "exec", dont_inherit=True), namespace)
            detail = "" if port.used else UNUSED
        except NotData as problem:
            status, detail = "error", str(problem)
        except BaseException as error:
            status, detail = _judge(port, error, job["imports"])
            if test is None and status == "failed":
                status, detail = "broken", f"the setup of the tests raised {detail}"
        if lost := port.failures.settle():
            status, detail = "failed", lost
        if port.end is not None:  # even if a test caught the exception
            status, detail = "timeout" if isinstance(port.end, TimeUp) else "gone", str(port.end)
        report(status, detail)
        if status not in ("passed", "failed"):
            return


def _judge(port: CheckerPort, error: BaseException, imports: list[str]) -> tuple[str, str]:
    """The meaning of an exception: the candidate has failed, or the tests cannot be run here."""
    detail = describe(error)
    if not is_own(error) or isinstance(error, SystemExit):
        return "failed", detail
    if isinstance(error, ImportError):
        wanted = (error.name or "").partition(".")[0]
        if not port.used or (wanted in imports and _is_missing(wanted)):
            status = "error" if wanted and _is_missing(wanted) else "unsure"
            return status, f"the tests must be able to import what they need (see the option packages), got {detail}"
    if not port.used and not isinstance(error, AssertionError | NameError):
        return "unsure", f"the tests must reach the response, but raised {detail}"
    return "failed", detail


def _is_missing(module: str) -> bool:
    try:
        __import__(module)
    except ImportError:
        return True
    return False


def make_namespace(port: CheckerPort, job: Job, texts: list[str]) -> dict[str, Any]:
    """The namespace of the tests: their own setup first, then built-ins and libraries, then what only the candidate can
    have.

    The prompt and the setup run here too, so that their helper functions are trusted ones and not the candidate's.
    """
    sys.modules[TESTS] = sys.modules["__main__"] = module = type(sys)(TESTS)  # unittest.main() looks there
    port.namespace = namespace = module.__dict__
    namespace["__builtins__"] = builtins
    guarded = attend(port, texts, bool(job["library"]))
    if job["prompt"]:
        try:
            exec(compile(job["prompt"], "prompt", "exec", dont_inherit=True), namespace)
        except Exception:  # a prompt may be text, or a function without a body
            namespace.clear()
            namespace.update(__name__=TESTS, __builtins__=builtins)
    for name, (path, wanted) in job["library"].items():
        needed = name in job["aliases"] or path.partition(".")[0].partition(":")[0] not in sys.stdlib_module_names
        found = _import(path, wanted, needed)
        if found is not None:
            namespace.setdefault(name, found)
    trusted = set(namespace) - {job["entry_point"]}
    for name in job["names"]:
        free = name not in trusted and not hasattr(builtins, name)
        if name in job["shadows"] or (free and port.ask("has", name)):
            namespace[name] = port.lookup(name)
    if job["entry_point"]:
        namespace["__candidate__"] = port.lookup(job["entry_point"])
    failures = port.failures
    namespace.update(__settle__=port.settle, __whole__=whole, __failed__=failures.failed, __caught__=failures.caught)
    namespace.update(__again__=failures.again, __leaving__=failures.leaving, __expected__=failures.expected)
    namespace["__number__"] = failures.number
    namespace.setdefault("getattr", guarded)
    exec(compile(job["setup"], "setup", "exec", dont_inherit=True), namespace)
    return namespace


def _import(path: str, wanted: list[str], needed: bool) -> Any:
    """`"math:isclose"` or `"math"` from a library; None if it lacks an attribute that the tests use."""
    module, _, name = path.partition(":")
    try:
        found: Any = __import__(module, fromlist=["*"])
    except ImportError as error:
        if needed:
            problem = f"the tests must be able to import what they need (see the option packages), got {error}"
            raise NotData(problem) from None
        return None
    found = getattr(found, name, None) if name else found
    return found if all(hasattr(found, attribute) for attribute in wanted) else None
