"""The `code` verifier: runs a program against its tests in a sandbox of this machine."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from kitae.errors import SandboxError, VerifierError
from kitae.sandbox.inside.usage import Clock
from kitae.sandbox.sandbox_jobs import Limits, Order, packed
from kitae.sandbox.session import Report, SandboxChoice, Session, open_session
from kitae.types import Score
from kitae.verifiers.code.extraction import Source
from kitae.verifiers.code.languages import LANGUAGES
from kitae.verifiers.code.plans import COMPILE_LIMIT, plan, prepare, program, without_code
from kitae.verifiers.code.references import Asserts, CheckFunction, Stdio
from kitae.verifiers.code.verdicts import (
    OutputRule,
    Verdict,
    all_failed,
    complaint,
    is_doubted,
    judge_case,
    take_verdicts,
    total_score,
    used,
)

_SLACK = 5.0  # seconds that the sandbox may need beyond the candidate's limit
_NATIVE_STACK = 256  # MiB


def code(
    response: str,
    reference: Any,
    context: Mapping[str, Any],
    *,
    language: str = "python",
    reward: Literal["all", "rate"] = "all",
    numbers: bool = False,
    tolerance: float = 0.0,
    time_limit: float = 4.0,
    total_limit: float = 9.0,
    memory_mb: int = 1024,
    sandbox: SandboxChoice = "auto",
    packages: bool = False,
) -> Score:
    """1 where the code in the response passes all tests; with `reward="rate"`, the share that it passes.

    `numbers`: compare the words of standard output that are numbers by their value, as LiveCodeBench does; `tolerance`:
    by how much they may differ, absolutely or relatively.
    `time_limit`: seconds of processor time per test, and twice that on the clock; loading the code counts as a test.
    `total_limit`: seconds for the whole check; tests that do not get their turn count as failed. It must be less than
    the pool's own timeout: for references with many or slow cases raise both, as `kitae verify code --timeout 60
    --option total_limit=55` does. `packages`: let
    Python code import what is installed beside Kitae. Asserts and check functions are for Python alone.
    """
    how = OutputRule(numbers, tolerance)
    prepared = prepare(response, reference, language, reward, how)
    if isinstance(prepared, Score):
        return prepared
    source, tests = prepared
    limits = Limits(
        time_limit=time_limit,
        memory_mb=memory_mb,
        limit_address_space=not LANGUAGES[language].reserves,
        stack_mb=_NATIVE_STACK if LANGUAGES[language].native else 0,
    )
    run = _Run(limits, sandbox, packages, total_limit, Clock())
    try:
        if isinstance(tests, Stdio):
            verdicts = _run_cases(run, language, source, tests, how)
        else:
            verdicts = _run_tests(run, source, tests)
    except (VerifierError, SandboxError) as error:
        return Score.error(str(error))
    return total_score(verdicts, reward)


@dataclass(frozen=True, slots=True)
class _Run:
    limits: Limits
    sandbox: SandboxChoice
    packages: bool
    total_limit: float
    clock: Clock

    @property
    def left(self) -> float:
        return self.total_limit - self.clock.read()

    def open(self, order: Order) -> Session:
        session = open_session(self.sandbox, order, self.limits, self.packages)
        try:
            ready = session.receive(_SLACK * 4, self.clock)
        except EOFError:
            ready = None
        if ready is None or ready.status != "ready":
            words = session.last_words()
            session.close()
            raise SandboxError(f"the sandbox did not start: {words or 'no answer'}")
        return session

    def receive(self, session: Session, limit: float | None = None) -> Report:
        """The warden's next report; "timeout" where it or the whole check is late, "gone" where it has ended."""
        patience = 2 * (self.limits.time_limit if limit is None else limit) + _SLACK
        left = self.left
        try:
            report = session.receive(max(0.0, min(patience, left)), self.clock)
        except EOFError:
            return Report("gone", "the sandbox ended", b"")
        if report is None:
            return Report("timeout", "no time left for the check" if left < patience else "no answer in time", b"")
        return report

    def reports(self, session: Session) -> Iterator[Report]:
        while True:
            yield self.receive(session)


def _run_tests(run: _Run, source: Source, tests: Asserts | CheckFunction) -> list[Verdict]:
    """One verdict per test. A test that hangs or kills the candidate costs a sandbox; the next test gets a new one.

    A test that fails before it reaches the candidate is an error only if it fails without the candidate too, which may
    have filled the disk or taken the test's folders.
    """
    order, job, names = plan(source, tests, run.limits.time_limit)

    def judge(order: Order, waiting: slice, alone: bool = False) -> list[Verdict]:
        with run.open(order) as session:
            with suppress(EOFError):  # the first report says so too
                session.send(packed({**job, "tests": job["tests"][waiting]}))
            return take_verdicts(run.reports(session), names[waiting], alone)

    verdicts: list[Verdict] = []
    while (done := len(verdicts)) < len(names) and run.left > 0:
        verdicts += judge(order, slice(done, None))
        if is_doubted(verdicts):
            judge(without_code(order), slice(done, len(verdicts)), alone=True)
    return used(verdicts + all_failed(names[len(verdicts) :], "no time left for the check"))


def _run_cases(run: _Run, language: str, source: Source, tests: Stdio, how: OutputRule) -> list[Verdict]:
    """One verdict per case. The cases run in an order that only who knows their output can tell, so that the number of
    a run, which time and process ids give away, does not say which case it is."""
    total = len(tests.cases)
    verdicts = dict(enumerate(all_failed(tests.cases, "no time left for the check")))
    secret = sha256(repr(tests.cases).encode(errors="backslashreplace")).digest()
    order = sorted(range(total), key=lambda i: sha256(secret + i.to_bytes(8, "little")).digest())
    with run.open(program(language, source, run.limits)) as session:
        loaded = run.receive(session, COMPILE_LIMIT)
        if loaded.status != "loaded":
            return all_failed(tests.cases, f"does not compile: {complaint(loaded)}")
        for place, number in enumerate(order):
            stdin, stdout = tests.cases[number]
            try:
                session.send(stdin.encode(errors="surrogatepass"), max(0.0, run.left))
                report = run.receive(session)
            except EOFError:
                report = Report("gone", "the sandbox ended", b"")
            verdicts[number] = judge_case(report, stdout, f"case {number + 1} of {total}", how)
            if report.status == "gone" or run.left <= 0:
                verdicts |= dict.fromkeys(order[place + 1 :], Verdict(False, complaint(report)))
                break
    return [verdicts[number] for number in range(total)]
