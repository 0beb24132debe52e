"""The failures in the tests' process that count although nothing passes them on."""

from __future__ import annotations

import os
import sys

from kitae.sandbox.inside.wire import describe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SLOTS = 4096  # of shared memory, one for each process of the tests
_KEPT, _LOST, _ASKING = 1, 2, 4


class Failures:
    """What has failed and was not caught by the tests' own text, which alone may say that a failure is none.

    A test fails by an exception, and whatever calls a part of it may drop that: a thread, a future, a handler of a log,
    a callback of a database, the end of an object. So each assertion that fails is entered here when it is raised, and
    taken out by a handler or a context manager that stands in the tests (`verifiers/code/weaving.py` puts calls of
    these methods there). Entries that are `kept` are those which futures, pools and processes hand out when they are
    asked: they count unless the tests have asked one for anything (`asked`), as `map` of a pool leaves the others.

    A fork has entries of its own. Whether it has any, or ended while it waited for the candidate, is seen here through
    shared memory.
    """

    def __init__(self) -> None:
        self.asked = False
        self._left: dict[int, tuple[BaseException, bool]] = {}
        self._home = os.getpid()
        self._shared: Any = None  # a byte for each fork
        os.register_at_fork(before=self._share, after_in_child=self._begin)

    def note(self, error: BaseException | None, kept: bool = False) -> None:
        if error is not None:
            self._left.setdefault(id(error), (error, kept))
            self._publish()

    def forgive(self, error: BaseException | None) -> None:
        self._left.pop(id(error), None)
        for member in getattr(error, "exceptions", ()):
            self.forgive(member)
        self._publish()

    def failed(self, *arguments: Any) -> AssertionError:
        """The exception of an assertion, `raise __failed__("told")` for `assert False, "told"`."""
        error = AssertionError(*arguments)
        self.note(error)
        return error

    def number(self, value: Any) -> Any:
        """A value that the tests compare by its size: the failure of NaN, which would be neither more nor less."""
        odd = isinstance(value, float) or type(value).__name__ == "Decimal"
        if odd and value != value:
            raise self.failed("a number that is none, and compares with nothing")
        return value

    def caught(self) -> None:
        """At the start of a handler of the tests."""
        self.forgive(sys.exc_info()[1])

    def again(self) -> None:
        """Before a bare `raise`."""
        error = sys.exc_info()[1]
        if isinstance(error, AssertionError):
            self.note(error)

    def expected(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """A call of `assertRaises` or the like, which catches what a function raises."""
        before = set(self._left)
        result = function(*arguments, **keywords)
        for key in {*self._left} - before:
            del self._left[key]
        self._publish()
        return result

    def leaving(self) -> Leaving:
        return Leaving(self)

    def asking(self, now: bool) -> None:
        """In a fork: whether it waits for the candidate."""
        if self._shared is not None and os.getpid() != self._home:
            self._publish(_ASKING if now else 0)

    def settle(self) -> str:
        """What has failed since the last call, or ""."""
        said = next((describe(e) for e, kept in self._left.values() if not (kept and self.asked)), "")
        counting = _LOST | _ASKING | (0 if self.asked else _KEPT)
        if not said and self._shared is not None and any(mark & counting for mark in self._shared[:]):
            said = "a process of the tests has failed"
        self._begin()
        if self._shared is not None:
            self._shared[:] = bytes(_SLOTS)
        return said

    def _share(self) -> None:
        import mmap

        self._shared = self._shared or mmap.mmap(-1, _SLOTS)

    def _begin(self) -> None:
        self.asked = False
        self._left.clear()

    def _publish(self, mark: int = 0) -> None:
        if self._shared is not None and (pid := os.getpid()) != self._home:
            for _, kept in self._left.values():
                mark |= _KEPT if kept else _LOST
            self._shared[pid % _SLOTS] = mark


class Leaving:
    """Stands around a context manager of the tests and within it: `with w, context, w`. What leaves the inner one and
    not the outer one, the context manager has swallowed, which stands in the tests."""

    def __init__(self, failures: Failures) -> None:
        self._failures, self._error, self._left = failures, None, False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._left and error is None:
            self._failures.forgive(self._error)
        self._left, self._error = True, error

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.__exit__(kind, error, trace)
