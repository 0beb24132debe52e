"""Proxies for the candidate's objects. They query the candidate, and never show it a value of the tests."""

from __future__ import annotations

import sys

from kitae.sandbox.inside.wire import NotData

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Protocol, TextIO

    from kitae.sandbox.inside.failures import Failures

    class Line(Protocol):
        """What a proxy needs of the port: `ask` queries the candidate; the streams are the tests' original ones."""

        stdin: TextIO
        stdout: TextIO

        @property
        def end(self) -> BaseException | None: ...

        def hear(self) -> None: ...

        lengths: Lengths
        failures: Failures

        def ask(self, op: str, *values: Any) -> Any: ...


_BATCH = 256  # items of a remote iterator in one batch, at most
_SCALING = ("mul", "matmul", "pow")  # operators that compare nothing
_SINGLES = 32  # items of a remote generator that are fetched singly, before batches begin


class Inert:
    """An object of the candidate that can only be passed back."""

    __slots__ = ("_handle",)

    def __init__(self, handle: int) -> None:
        self._handle = handle


class Lengths:
    """What objects have said of their lengths. A loop of the tests over fewer items than that would compare too little:
    `len(got) == 3 and all(a == b for a, b in zip(got, want))`."""

    def __init__(self) -> None:
        self._said: dict[int, int] = {}  # by handle, since the last request that may change an object

    def changed(self) -> None:
        self._said.clear()

    def said(self, remote: Remote, length: int) -> int:
        if length < self._said.setdefault(remote._handle, length):
            raise self._lie(remote)
        return length

    def counted(self, remote: Remote, items: Iterator[Any]) -> Iterator[Any]:
        return self._count(remote, items, self._said[remote._handle]) if remote._handle in self._said else items

    def _count(self, remote: Remote, items: Iterator[Any], length: int) -> Iterator[Any]:
        count = 0
        for item in items:
            count += 1
            yield item
        if count < length == self._said.get(remote._handle):
            raise self._lie(remote)

    def _lie(self, remote: Remote) -> AssertionError:
        failures: Failures = remote._port.failures
        return failures.failed("an object of the candidate has fewer items than its length")


class Remote:
    # A proxy for an object of the candidate. It has no docstring, which would be taken for the object's own.
    # `_operable`: whether it takes operands of the tests, see `_binary`; None if that is not known yet.

    __slots__ = ("_handle", "_kind", "_operable", "_port")

    def __init__(self, port: Line, handle: int, kind: str) -> None:
        for name, value in zip(Remote.__slots__, (handle, kind, None, port), strict=True):
            object.__setattr__(self, name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        port = self._port
        op = "method" if self._kind == "method" else "call"
        if sys.stdin is not port.stdin:
            port.ask("stdin", sys.stdin.read())
        captures = sys.stdout is not port.stdout
        if captures:
            port.ask("capture")
        try:
            return port.ask(op, self, list(arguments), keywords)
        finally:
            if captures and port.end is None:
                sys.stdout.write(port.ask("captured"))
            port.hear()

    def __getattr__(self, name: str) -> Any:
        if name == "__signature__":
            return _signature(self._port.ask("signature", self))
        return self._port.ask("getattr", self, name)

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return self._port.ask("getattr", self, "__doc__")

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        if self._kind == "class":
            return type
        found = self._port.ask("getattr", self, "__class__")
        return found if type(found) is Remote else Remote

    def __setattr__(self, name: str, value: Any) -> None:
        self._port.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._port.ask("delattr", self, name)

    def __copy__(self) -> Any:
        return self._port.ask("copy", self, False)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._port.ask("copy", self, True)

    def __mro_entries__(self, bases: Any) -> Any:
        raise NotData("the tests derive a class from one of the candidate's, which cannot leave its process")

    def __getitem__(self, key: Any) -> Any:
        return self._port.ask("operator", "getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._port.ask("operator", "setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._port.ask("operator", "delitem", self, key)

    def __iter__(self) -> Any:
        iterator = self._port.ask("builtin", "iter", self)
        if iterator is self:
            return self
        items = _items(iterator) if type(iterator) is Remote else iter(iterator)
        return self._port.lengths.counted(self, items)

    def __len__(self) -> int:
        lengths: Lengths = self._port.lengths
        return lengths.said(self, self._port.ask("builtin", "len", self))

    def __next__(self) -> Any:
        return self._port.ask("builtin", "next", self)

    def __aiter__(self) -> Any:
        return self._port.ask("builtin", "aiter", self)

    async def __anext__(self) -> Any:
        return self._port.ask("anext", self)

    def __await__(self) -> Any:
        return result_of(self).__await__()

    def __contains__(self, item: Any) -> bool:
        if self._operable:
            return bool(self._port.ask("operator", "contains", self, item))
        return any(item is other or item == other for other in self)

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Remote and bool(self._port.ask("builtin", "isinstance", value, self))

    def __subclasscheck__(self, value: Any) -> bool:
        return type(value) is Remote and bool(self._port.ask("builtin", "issubclass", value, self))

    def __enter__(self) -> Any:
        return self._port.ask("getattr", self, "__enter__")()

    def __exit__(self, *details: object) -> None:
        # Neither its result nor its own exception can take the place of an exception of the tests.
        try:
            self._port.ask("getattr", self, "__exit__")(None, None, None)
        except Exception:
            if details[0] is None:
                raise

    async def __aenter__(self) -> Any:
        return await self._port.ask("getattr", self, "__aenter__")()

    async def __aexit__(self, *details: object) -> None:
        try:
            await self._port.ask("getattr", self, "__aexit__")(None, None, None)
        except Exception:
            if details[0] is None:
                raise

    def __hash__(self) -> int:
        return int(self._port.ask("builtin", "hash", self))

    def __eq__(self, other: object) -> bool:
        return self._compare("eq", other, False)

    def __ne__(self, other: object) -> bool:
        return self._compare("ne", other, True)

    def _compare(self, name: str, other: object, otherwise: bool) -> bool:
        if type(other) is not Remote:
            return otherwise
        return bool(self._port.ask("operator", name, self, other))


def _items(iterator: Remote) -> Iterator[Any]:
    count, more = 1, True
    while more:
        items, more = iterator._port.ask("items", iterator, count)
        yield from items
        count = min(2 * count, _BATCH)


def generator(remote: Remote) -> Any:
    """A proxy for a generator of the candidate. Items are fetched singly at first, and later in batches."""
    port, count, more, singles = remote._port, 1, True, 0
    sent = None
    while more:
        if sent is not None or singles < _SINGLES:
            singles += 1
            try:
                items, sent = [port.ask("send", remote, sent)], None
            except StopIteration as end:
                return end.value
        else:
            items, more = port.ask("items", remote, count)
            count = min(2 * count, _BATCH)
        items.reverse()
        while items:
            try:
                sent = yield items.pop()
            except Exception as error:
                _check_place(items)
                try:
                    items = [port.ask("throw", remote, type(error), error.args)]
                except StopIteration as end:
                    return end.value
            if sent is not None:
                _check_place(items)
    return None


def _check_place(items: list[Any]) -> None:
    if items:
        raise NotData("the tests send a value to a generator of the candidate's that is already further on")


def _signature(parameters: list[list[Any]]) -> Any:
    """A signature without annotations, from names, kinds and defaults."""
    import inspect

    return inspect.Signature(
        [
            inspect.Parameter(name, inspect._ParameterKind(kind), default=default[0] if default else inspect._empty)
            for name, kind, *default in parameters
        ]
    )


async def result_of(coroutine: Remote) -> Any:
    """A proxy for a coroutine of the candidate, which runs in the candidate's process from start to end."""
    return coroutine._port.ask("await", coroutine)


def _order(name: str) -> Callable[..., bool]:
    def method(self: Remote, other: object) -> bool:
        if type(other) is not Remote:
            raise TypeError("an object of the candidate has no order among the values of the tests")
        return bool(self._port.ask("operator", name, self, other))

    return method


def _binary(name: str, reflected: bool) -> Callable[..., Any]:
    """An operator. A value of the tests is an operand only of an object that the tests have made of a class that they
    name, `Vector(1, 2) + 3`, or a factor, `vector(1, 2) * 3`. What a function has answered gets no other: `f(3) - 9417`
    would tell it what to be."""

    def method(self: Remote, other: object) -> Any:
        left, right = (other, self) if reflected else (self, other)
        if type(other) is not Remote and not self._operable and name not in _SCALING:
            return NotImplemented
        return self._port.ask("operator", name, left, right)

    return method


def _unary(op: str, name: str) -> Callable[..., Any]:
    def method(self: Remote, *arguments: Any) -> Any:
        return self._port.ask(op, name, self, *arguments)

    return method


for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _order(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "xor"):
    setattr(Remote, f"__{_name}__", _binary(_name, reflected=False))
    setattr(Remote, f"__r{_name}__", _binary(_name, reflected=True))
for _name in ("and", "or"):
    setattr(Remote, f"__{_name}__", _binary(f"{_name}_", reflected=False))
    setattr(Remote, f"__r{_name}__", _binary(f"{_name}_", reflected=True))
for _name in ("bool", "int", "float", "complex", "str", "repr", "abs", "round", "reversed", "format"):
    setattr(Remote, f"__{_name}__", _unary("builtin", _name))
for _name in ("neg", "pos", "invert", "index"):
    setattr(Remote, f"__{_name}__", _unary("operator", _name))
