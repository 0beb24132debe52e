"""A Python console in a sandbox, whose names stay defined between cells.

    with PythonConsole("auto", Limits(time_limit=4.0)) as console:
        console.run("x = 6 * 7")        Report("ended", "", b"")
        console.run("x")                Report("ended", "", b"42\\n")

An exception is part of a cell's output. A cell that breaks a limit, or ends its process, loses the console's state: the
next cell starts with a new one, and the report's status says so ("timeout", "crashed", "gone").
"""

from typing import Self

from kitae.errors import SandboxError
from kitae.sandbox.sandbox_jobs import Limits, Order
from kitae.sandbox.session import Report, SandboxChoice, Session, open_session

_START_LIMIT = 20.0  # seconds
_SLACK = 5.0  # seconds of delay allowed to the warden


class PythonConsole:
    """The console; `run` blocks. packages: whether packages installed beside Kitae can be imported."""

    def __init__(self, sandbox: SandboxChoice, limits: Limits, packages: bool = False) -> None:
        self._sandbox: SandboxChoice = sandbox
        self._limits, self._packages = limits, packages
        self._session: Session | None = None

    def run(self, code: str) -> Report:
        """Run a cell. Raises `SandboxError` if no sandbox can be started."""
        session = self._session or self._open()
        try:
            session.send(code.encode(errors="backslashreplace"))
            report = session.receive(2 * self._limits.time_limit + _SLACK)
        except EOFError:
            report = Report("gone", "the sandbox ended", b"")
        if report is None:
            report = Report("gone", "the sandbox does not answer", b"")
        if report.status == "gone":
            self.close()
        return report

    def _open(self) -> Session:
        order: Order = {"mode": "console", "variants": []}
        session = open_session(self._sandbox, order, self._limits, self._packages)
        try:
            for expected in ("ready", "loaded"):
                report = session.receive(_START_LIMIT)
                if report is None or report.status != expected:
                    raise EOFError
        except EOFError:
            words = session.last_words()
            session.close()
            raise SandboxError(f"the sandbox did not start: {words or 'no answer'}") from None
        self._session = session
        return session

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
