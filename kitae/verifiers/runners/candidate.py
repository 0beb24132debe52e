"""The candidate's side: runs its code, then does what the checker asks of its functions and objects.

Nothing here is trusted: this process belongs to the candidate as soon as its code runs, and all it can do with the
line is to answer a question with some plain data.
"""

from __future__ import annotations

import _operator
import builtins
import sys

from kitae.verifiers.runners.wire import Port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from kitae.verifiers.runners.wire import Node

NAME = "candidate"  # the module name of the code


def serve(fd: int, setup: str, variants: list[str]) -> None:
    """Load the first of `variants` that is Python, tell the checker how that went, and answer until it hangs up."""
    port = CandidatePort(fd)
    port.namespace.update(__name__=NAME, __builtins__=builtins)
    sys.modules[NAME] = module = type(sys)(NAME)
    module.__dict__.update(port.namespace)
    port.namespace = module.__dict__
    try:
        _prepare(port, setup)
        exec(compile_first(variants, "candidate.py"), port.namespace)
    except BaseException as error:
        port.send(["failed", f"{type(error).__name__}: {error}"[:500]])
        return
    port.send(["loaded"])
    while True:
        try:
            message = port.receive()
        except EOFError:
            return
        port.send(port.reply(message))


def _prepare(port: CandidatePort, setup: str) -> None:
    """Names that the code may expect: imports, helpers and classes of the tests. They may expect the code in turn."""
    try:
        exec(compile(setup, "setup", "exec"), port.namespace)
    except BaseException:
        return
    finally:
        port.classes = {
            value.__qualname__: value
            for value in list(port.namespace.values())
            if isinstance(value, type) and value.__module__ == NAME
        }


def compile_first(variants: list[str], name: str) -> Any:
    """The first of `variants` that is Python, compiled; or else the error of the first."""
    problem: Exception | None = None
    for variant in variants:
        try:
            return compile(variant, name, "exec", dont_inherit=True)
        except Exception as error:  # SyntaxError, ValueError for NULs, RecursionError, MemoryError
            problem = problem or error
    assert problem is not None
    raise problem


class CandidatePort(Port):
    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self.namespace: dict[str, Any] = {}
        self.raised: dict[Any, Exception] = {}  # by iterator

    def reply(self, message: Any) -> Any:
        """Do `[op, refs, nodes]`; the answer also tells what the call changed in its arguments."""
        op, refs, nodes = message
        try:
            arguments, changeable = self.decode(refs, nodes, {})
            before = self.encode(changeable)[:2] if changeable and op == "call" else None
            if op == "opaque":  # an operand came from the tests: the result stays here, whatever it is
                return ["ok", [[0]], [self.offer(self.do_operator(*arguments))]]
            result = getattr(self, f"do_{op}")(*arguments)
            changed = changeable if before is not None and self.encode(changeable)[:2] != before else []
            answer, answer_nodes, _ = self.encode([result, *changed])
            return ["ok", answer, answer_nodes]
        except BaseException as error:
            return self._problem(error)

    def _problem(self, error: BaseException) -> Any:
        kinds = [[kind.__module__, kind.__qualname__] for kind in type(error).__mro__[:-1]]
        try:
            return ["raised", kinds, self.export(type(error)), *self.encode(error.args)[:2]]
        except BaseException:
            return ["raised", kinds, self.export(type(error)), [], []]

    def ask(self, op: str, *values: Any) -> Any:
        """Let the checker do something with an object of the tests that was handed to the candidate."""
        refs, nodes, _ = self.encode(values)
        self.send(["ask", op, refs, nodes])
        kind, *rest = self.receive()
        if kind == "raised":
            raise getattr(builtins, rest[0], RuntimeError)(rest[1])
        return self.decode(rest[0], rest[1], {})[0][0]

    def offer(self, value: Any) -> Node:
        """`["ref", handle, kind, name, base]`, where base is the built-in parent of an exception."""
        kind, base, name = "object", "", getattr(value, "__name__", "")
        if isinstance(value, type(sys)):
            kind = "module"
        elif isinstance(value, type):
            kind = "class"
            if issubclass(value, BaseException):
                kind = "exception"
                base = next(c.__name__ for c in value.__mro__ if c.__module__ == "builtins")
        elif callable(value):
            kind = "function"
        elif type(value).__name__ == "coroutine":
            kind = "coroutine"
        if kind in ("class", "function") and isinstance(getattr(value, "__module__", None), str):
            base = base or value.__module__
        return ["ref", self.export(value), kind, name if isinstance(name, str) else "", base]

    def adopt(self, node: Node) -> Any:
        return Given(self, node[1])

    def home(self, value: Any) -> int | None:
        return value._handle if type(value) is Given else None

    def do_name(self, name: str) -> Any:
        if name not in self.namespace:
            raise NameError(f"name {name!r} is not defined")
        return self.namespace[name]

    def do_has(self, name: str) -> bool:
        return name in self.namespace

    def do_call(self, function: Any, arguments: Any, keywords: Any) -> Any:
        return function(*arguments, **keywords)

    def do_getattr(self, value: Any, name: str) -> Any:
        return getattr(value, name)

    def do_setattr(self, value: Any, name: str, new: Any) -> None:
        setattr(value, name, new)

    def do_operator(self, name: str, *operands: Any) -> Any:
        return getattr(_operator, name)(*operands)

    def do_builtin(self, name: str, *arguments: Any) -> Any:
        return getattr(builtins, name)(*arguments)

    def do_items(self, iterator: Any, count: int) -> Any:
        """Up to `count` further items, and whether there may be more; an error waits until those before it are gone."""
        if iterator in self.raised:
            raise self.raised[iterator]
        items = []
        try:
            for item in iterator:
                items.append(item)
                if len(items) == count:
                    return [items, True]
        except Exception as error:
            if not items:
                raise
            self.raised[iterator] = error
            return [items, True]
        return [items, False]

    def do_await(self, awaitable: Any) -> Any:
        import asyncio

        async def wait() -> Any:
            return await awaitable

        return asyncio.run(wait())


class Given:
    """An object of the tests, in the candidate's hands: it can be called and iterated."""

    def __init__(self, port: CandidatePort, handle: int) -> None:
        self.__dict__.update(_port=port, _handle=handle)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._port.ask("call", self, arguments, keywords)

    def __iter__(self) -> Any:
        return self._port.ask("iter", self)

    def __next__(self) -> Any:
        return self._port.ask("next", self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._port.ask("getattr", self, name)
