"""Changes to modules that the tests use, made before they run: see `attend`."""

from __future__ import annotations

import builtins
import sys

from kitae.sandbox.inside.port import TESTS
from kitae.sandbox.inside.wire import NotData

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from kitae.sandbox.inside.port import CheckerPort

_ARITHMETIC = {  # nodes of plain arithmetic
    "Add", "And", "BinOp", "BitAnd", "BitOr", "BitXor", "BoolOp", "Compare", "Constant", "Dict", "Div", "Eq",
    "Expression", "FloorDiv", "Gt", "GtE", "In", "Invert", "Is", "IsNot", "LShift", "List", "Load", "Lt", "LtE",
    "Mod", "Mult", "Not", "NotEq", "NotIn", "Or", "Pow", "RShift", "Set", "Sub", "Tuple", "UAdd", "USub", "UnaryOp",
}  # fmt: skip


def attend(port: CheckerPort, texts: str, constants: list[str]) -> None:
    """Prepare modules that the tests use: random seeds apply to the candidate too, no failure that unittest has
    recorded is lost, and no text from the candidate is run as a program."""
    if "seed" in texts:
        _share_seeds(port)
    if "unittest" in texts:
        _keep_failures()
    if "pickle" in texts:
        _unpickle_data_alone()
    for name in ("eval", "exec", "compile"):
        if name in texts:
            port.constants = set(constants)
            port.namespace[name] = _wary(port, name)


def _share_seeds(port: CheckerPort) -> None:
    import random

    seed = random.seed

    def both(*arguments: Any, **keywords: Any) -> None:
        seed(*arguments, **keywords)
        port.ask("seed", list(arguments), keywords)

    random.seed = both


def _keep_failures() -> None:
    import unittest

    run = unittest.TextTestRunner.run

    def checked(self: Any, test: Any) -> Any:
        result = run(self, test)
        if not result.testsRun:
            raise NotData("the tests must have something for unittest to run")
        problems = [*result.errors, *result.failures]
        if problems or result.unexpectedSuccesses:
            raise AssertionError(problems[0][1].strip().rpartition("\n")[2] if problems else "unexpected success")
        return result

    def main(*arguments: Any, **keywords: Any) -> Any:
        return unittest.TestProgram(*arguments, **(keywords | {"exit": False}))

    unittest.TextTestRunner.run = checked  # type: ignore[method-assign]
    unittest.main = main  # type: ignore[assignment]


def _unpickle_data_alone() -> None:
    import io
    import pickle

    class Careful(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module != TESTS:
                raise pickle.UnpicklingError(f"{module}.{name} is no data")
            return super().find_class(module, name)

    def load(file: Any, **keywords: Any) -> Any:
        return Careful(file, **keywords).load()

    pickle.Unpickler, pickle.load = Careful, load  # type: ignore[misc]
    pickle.loads = lambda data, /, **keywords: load(io.BytesIO(data), **keywords)


def _wary(port: CheckerPort, name: str) -> Callable[..., Any]:
    """eval, exec or compile for the tests, which runs no text that may be the candidate's.

    Before the candidate has answered with text, no text can be; afterwards, only arithmetic is allowed.
    """
    real = getattr(builtins, name)

    def run(source: Any, *rest: Any, **keywords: Any) -> Any:
        foreign = port.told and isinstance(source, str | bytes | bytearray) and source not in (port.constants or ())
        if foreign and (name != "eval" or not _is_arithmetic(source)):
            raise TypeError(f"{name} of text that the candidate may have made")
        if name != "compile" and not rest:
            caller = sys._getframe(1)
            rest = (caller.f_globals, caller.f_locals)
        return real(source, *rest, **keywords)

    run.__wrapped__ = real  # type: ignore[attr-defined]
    return run


def _is_arithmetic(source: Any) -> bool:
    import ast

    return all(type(node).__name__ in _ARITHMETIC for node in ast.walk(ast.parse(source.strip(), mode="eval")))
