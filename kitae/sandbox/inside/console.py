"""The candidate of a console: runs code cell by cell in one namespace, and prints the value of each cell's last line.

It receives a mark and a cell as a frame, and answers with the mark when the cell has run; anything else written there
is ignored. The output of cells goes to stdout.
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


def run_cells(fd: int) -> None:
    """Run cells until the connection is closed."""
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
        _print_error(error)


def _print_error(error: BaseException) -> None:
    """Print the part of the traceback that concerns the cell."""
    import traceback

    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename != _NAME:
        place = place.tb_next
    try:
        print("".join(traceback.format_exception(type(error), error, place)).rstrip(), file=sys.stdout)
    except BaseException:  # the error's own text raises
        print(type(error).__name__, file=sys.stdout)
