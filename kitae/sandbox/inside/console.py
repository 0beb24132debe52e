"""The candidate of a console: runs code cell by cell in one namespace, and prints what the last line of each is worth.

It gets a mark and a cell as a frame on its line, and answers with the mark when that has run: what else is written
there means nothing. Whatever it says goes to stdout.
"""

from __future__ import annotations

import builtins
import sys

from kitae.sandbox.inside.candidate import furnish
from kitae.sandbox.inside.wire import read_frame, write_frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NAME = "<cell>"
MARK = 16  # bytes


def talk(fd: int) -> None:
    """Run cells until the line is closed."""
    import __main__

    sys.argv[:] = [""]
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115
    sys.stdout.close()
    namespace = vars(__main__)
    namespace.clear()
    namespace.update(__name__="__main__", __builtins__=builtins, __doc__=None)
    furnish(namespace, {"mode": "console", "variants": []})
    while True:
        try:
            frame = read_frame(fd)
        except EOFError:
            return
        if sys.stdout is None or sys.stdout.closed:
            sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = sys.stdout
        _run(frame[MARK:].decode(errors="replace"), namespace)
        try:  # noqa: SIM105 - the cell may have closed or replaced it
            sys.stdout.flush()
        except BaseException:
            pass
        write_frame(fd, frame[:MARK])


def _run(code: str, namespace: dict[str, Any]) -> None:
    import ast
    import linecache

    linecache.cache[_NAME] = (len(code), None, code.splitlines(True), _NAME)
    try:
        tree = ast.parse(code, _NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, _NAME, "exec", dont_inherit=True), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), _NAME, "eval", dont_inherit=True), namespace)
            if value is not None:
                namespace["_"] = value
                print(repr(value))
    except SystemExit:
        return
    except BaseException as error:
        _tell(error)


def _tell(error: BaseException) -> None:
    """The traceback as far as it is the cell's."""
    import traceback

    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename != _NAME:
        place = place.tb_next
    try:
        print("".join(traceback.format_exception(type(error), error, place)).rstrip(), file=sys.stdout)
    except BaseException:  # it cannot even say what it is
        print(type(error).__name__, file=sys.stdout)
