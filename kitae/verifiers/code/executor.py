"""The verifier of programs that are run elsewhere, on a server with the API of SandboxFusion.

    POST {url}/run_code  {"code", "language", "stdin", "compile_timeout", "run_timeout", "memory_limit_MB"}
    →  {"status": "Success" | "Failed" | "SandboxError", "message", "compile_result", "run_result"}, where a result is
       {"status": "Finished" | "Error" | "TimeLimitExceeded", "return_code", "stdout", "stderr"}

It only waits, so it needs no worker and never blocks the trainer. References and options are those of `code`.

Expected output stays here. For asserts and check functions the server gets a Python program with Kitae's checker and
the candidate's code. The tests are sent on its stdin, which the candidate does not have, and run in a process of their
own as in the local sandbox.

Covered: a server that is down, slow, wrong or cut off is an error and never a 0. Not covered: the server itself, which
is trusted to isolate what it runs and to report truly. If it runs programs as root, a candidate can read and write the
memory of the process with the tests, so it should use a user without rights. Times are the server's, on the clock.
"""

import asyncio
import base64
import itertools
from collections.abc import Mapping
from typing import Any, Literal

from kitae.clients.http_client import ask
from kitae.clients.service import Service
from kitae.errors import RemoteError, VerifierError
from kitae.sandbox.boot import PACKAGES, inside_sources
from kitae.sandbox.sandbox_jobs import Job, Limits, Order, complete_order, packed
from kitae.sandbox.session import Report
from kitae.types import Score
from kitae.verifiers.code.extraction import Source, variants
from kitae.verifiers.code.plans import COMPILE_LIMIT, plan, prepare, without_code
from kitae.verifiers.code.references import Asserts, CheckFunction, Stdio
from kitae.verifiers.code.verdicts import OutputRule, Verdict, is_doubted, judge_case, take_verdicts, total_score, used
from kitae.verifiers.options import service_options

_NAMES = {"javascript": "nodejs"}  # languages that have other names in the API
_SLACK = 5.0  # seconds for the start of a program on the server
_MARK = "report "  # before each line of reports
_MARSHAL = 2  # a version that every Python 3 reads
_PROGRAM = """
import base64, os, sys
import _ctypes
_ctypes.call_function(_ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl"), (4, 0, 0, 0, 0))
orders, give = os.pipe()
take, reports = os.pipe()
if os.fork() == 0:
    os.dup2(orders, 0)
    os.dup2(reports, 1)
    os.closerange(3, 256)
    for name in PACKAGES:
        sys.modules[name] = module = type(sys)(name)
        module.__path__ = []
    for name, source in SOURCES:
        sys.modules[name] = module = type(sys)(name)
        exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
    module.main(lambda mode: None)
os.close(orders)
os.close(reports)
data = base64.b64decode(sys.stdin.read())
while data:
    data = data[os.write(give, data):]
while True:
    data = os.read(take, 65536)
    if not data:
        break
    print(MARK + base64.b64encode(data).decode(), flush=True)
"""


@service_options("concurrency", "retries", "backoff", "deadline")
async def remote_code(
    response: str,
    reference: Any,
    context: Mapping[str, Any],
    *,
    url: str,
    language: str = "python",
    reward: Literal["all", "rate"] = "all",
    numbers: bool = False,
    tolerance: float = 0.0,
    time_limit: float = 4.0,
    total_limit: float = 30.0,
    memory_mb: int = 1024,
    key_env: str = "",
    **options: Any,
) -> Score:
    """1 where the code in the response passes all tests on the server at `url`; with `reward="rate"`, their share.

    `total_limit`: seconds for one program with all its asserts. The options from `key_env` on are `Service`'s.
    """
    how = OutputRule(numbers, tolerance)
    prepared = prepare(response, reference, language, reward, how)
    if isinstance(prepared, Score):
        return prepared
    source, tests = prepared
    limits = Limits(time_limit=time_limit, memory_mb=memory_mb)
    try:
        request_timeout = COMPILE_LIMIT + max(total_limit, time_limit) + _SLACK
        service = Service(base_url=url, model="run_code", key_env=key_env, request_timeout=request_timeout, **options)
        if isinstance(tests, Stdio):
            verdicts = await _run_cases(service, language, source, tests, limits, how)
        else:
            verdicts = await _run_tests(service, source, tests, limits, total_limit)
    except (VerifierError, RemoteError) as error:
        return Score.error(f"executor: {error}")
    return total_score(verdicts, reward)


async def _run_cases(
    service: Service, language: str, source: Source, tests: Stdio, limits: Limits, how: OutputRule
) -> list[Verdict]:
    async def one(number: int, stdin: str, stdout: str) -> Verdict:
        report = await _post(service, language, variants(source)[0], stdin, limits.time_limit, limits.memory_mb)
        return judge_case(report, stdout, f"case {number} of {len(tests.cases)}", how)

    cases = [one(number, *case) for number, case in enumerate(tests.cases, 1)]
    return list(await asyncio.gather(*cases))


async def _run_tests(
    service: Service, source: Source, tests: Asserts | CheckFunction, limits: Limits, total_limit: float
) -> list[Verdict]:
    """Run tests as locally: those after a test that hangs or kills the candidate run in a new program."""
    order, job, names = plan(source, tests, limits.time_limit)
    program = f"PACKAGES = {PACKAGES}\nSOURCES = {inside_sources()!r}\nMARK = {_MARK!r}\n{_PROGRAM}"

    async def judge(order: Order, waiting: slice, alone: bool = False) -> list[Verdict]:
        told: Job = {**job, "tests": job["tests"][waiting]}
        parts = (packed(complete_order(order, limits), _MARSHAL), packed(told, _MARSHAL))
        frames = b"".join(map(_frame, parts))
        stdin = base64.b64encode(frames).decode()
        report = await _post(service, "python", program, stdin, total_limit, 2 * limits.memory_mb)
        reports = read_reports(report.output.decode(errors="replace"))
        if not reports or reports[0].status != "ready":
            raise VerifierError(f"the checker must start on the server, got {report.status}: {report.detail[-300:]!r}")
        ending = Report("timeout" if report.status == "timeout" else "gone", report.detail or "the program ended", b"")
        return take_verdicts(itertools.chain(reports[1:], itertools.repeat(ending)), names[waiting], alone)

    verdicts: list[Verdict] = []
    while (done := len(verdicts)) < len(names):
        verdicts += await judge(order, slice(done, None))
        if is_doubted(verdicts):
            await judge(without_code(order), slice(done, len(verdicts)), alone=True)
    return used(verdicts)


def read_reports(stdout: str) -> list[Report]:
    """The reports of a checker in the output of its program, without incomplete ones and other output."""
    data = b""
    for line in stdout.splitlines():
        if line.startswith(_MARK):
            try:
                data += base64.b64decode(line.removeprefix(_MARK), validate=True)
            except ValueError:
                break
    parts = []
    while len(data) >= 8:
        size = int.from_bytes(data[:8], "little")
        if len(data) < 8 + size:
            break
        parts.append(data[8 : 8 + size])
        data = data[8 + size :]
    triples = zip(parts[::3], parts[1::3], parts[2::3], strict=False)
    return [
        Report(status.decode(errors="replace"), detail.decode(errors="replace"), out) for status, detail, out in triples
    ]


async def _post(service: Service, language: str, program: str, stdin: str, time_limit: float, memory_mb: int) -> Report:
    body = {
        "code": program,
        "language": _NAMES.get(language, language),
        "stdin": stdin,
        "compile_timeout": COMPILE_LIMIT,
        "run_timeout": time_limit,
        "memory_limit_MB": memory_mb,
    }
    return await ask(service, "/run_code", body, read_answer)


def read_answer(answer: Any) -> Report:
    """The server's answer as a report. Raises `VerifierError` if the server reports a failure of its own."""
    if not isinstance(answer, Mapping) or answer.get("status") not in ("Success", "Failed"):
        raise VerifierError(f"the server must run the code, got {str(answer)[:300]!r}")
    compiled, ran = answer.get("compile_result"), answer.get("run_result")
    if isinstance(compiled, Mapping) and (compiled.get("status") != "Finished" or compiled.get("return_code")):
        return Report("unloadable", f"does not compile: {_tail(compiled)}", b"")
    if not isinstance(ran, Mapping):
        raise VerifierError(f"the server must give a run_result, got {str(answer)[:300]!r}")
    output = str(ran.get("stdout") or "").encode(errors="replace")
    match ran.get("status"), ran.get("return_code"):
        case "TimeLimitExceeded", _:
            return Report("timeout", "on the server", output)
        case "Finished", 0:
            return Report("ended", "", output)
        case "Finished", int(code):
            return Report("crashed", f"exit status {code}: {_tail(ran)}", output)
        case status, code:
            raise VerifierError(
                f"a run must be Finished or TimeLimitExceeded, got {status!r} with return code {code!r}"
            )


def _tail(result: Mapping[str, Any]) -> str:
    return str(result.get("stderr") or result.get("stdout") or result.get("status"))[-300:].strip()


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data
