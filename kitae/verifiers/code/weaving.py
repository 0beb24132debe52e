"""What is woven into tests so that their statements mean what they say, whatever the code under test does."""

import ast
import functools
import itertools
from collections.abc import Iterator

SETTLE = "__settle__()"
_ENDING = {"next", "__next__", "anext", "__anext__", "send", "throw"}  # what may raise StopIteration on purpose
_CALLERS = {"map", "filter", "filterfalse", "starmap", "takewhile", "dropwhile", "accumulate", "partial"}
_EXPECTING = {"raises", "assertRaises", "assertRaisesRegex", "assert_raises", "assert_raises_regex"}
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_CALLING = (
    ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.If, ast.Delete, ast.For, ast.While, ast.With, ast.AsyncFor,
    ast.AsyncWith,
)  # fmt: skip


@functools.lru_cache(maxsize=4096)
def settled(text: str) -> str:
    """Tests with the calls that the checker defines (`kitae/sandbox/inside/checker.py`):

    - `__settle__()` stands between statements: from there on changes of a call's arguments are visible, so that
      `assert f(xs) == sorted(xs)` does not sort what f has made of xs.
    - A StopIteration does not leave a function, a lambda, or `next` as an argument of `map`, as it does not leave a
      generator: it would end the loop that calls them, and `all(map(lambda x: next(it) == x, xs))` would pass.
    - What is computed in an ordered comparison is no NaN.
    - An assertion enters its failure in the `Failures`; handlers and context managers of the tests take it out.
    """
    try:
        return ast.unparse(_Weaver().visit(ast.parse(text)))
    except RecursionError:  # nested too deeply to be unparsed
        return text


class _Weaver(ast.NodeTransformer):
    def __init__(self) -> None:
        self._numbers = itertools.count()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        ends = node.name != "__next__" and _ending(node) and not _raises_stop(node)
        verdict = node.name == "__next__" and any(map(_gives_verdict, ast.walk(node)))
        self.generic_visit(node)
        if verdict:
            _WholeCalls().visit(node)
        if ends:
            kept = node.body[: ast.get_docstring(node) is not None]
            guard = ast.parse("try: pass\nexcept StopIteration: raise RuntimeError('StopIteration in a function')")
            guarded = guard.body[0]
            assert isinstance(guarded, ast.Try)
            guarded.body = node.body[len(kept) :] or guarded.body
            node.body = [*kept, guarded]
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        ends = _ending(node)
        self.generic_visit(node)
        if ends:
            node.body = _whole(node.body)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if _asks_for_main(node):
            return ast.Constant(True)
        if any(isinstance(op, _ORDERS) for op in node.ops):
            node.left, *node.comparators = map(_counting, (node.left, *node.comparators))
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """`f(xs) is None and xs == [1, 3]`: what answers nothing is there to change its argument."""
        self.generic_visit(node)
        if isinstance(node.op, ast.And):
            node.values = [
                part
                for value in node.values
                for part in ((value, _settle().value) if _gives_nothing(value) else (value,))
            ]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = called(node)
        if name in _CALLERS:
            node.args = [_whole_function(a) if _name_of(a) in _ENDING else a for a in node.args]
        elif name in _EXPECTING and len(node.args) > 1:
            return ast.Call(ast.Name("__expected__", ast.Load()), [node.func, *node.args], node.keywords)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        failed = ast.Call(ast.Name("__failed__", ast.Load()), [node.msg] if node.msg else [], [])
        return ast.If(ast.UnaryOp(ast.Not(), node.test), [ast.Raise(failed)], [])

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, _statement("__caught__()"))
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node if node.exc else [_statement("__again__()"), node]

    def visit_With(self, node: ast.With | ast.AsyncWith) -> ast.AST:
        self.generic_visit(node)
        name = f"__left{next(self._numbers)}__"
        outer = ast.parse(f"({name} := __leaving__())", mode="eval").body
        node.items = [ast.withitem(outer), *node.items, ast.withitem(ast.Name(name, ast.Load()))]
        return node

    visit_AsyncWith = visit_With

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block:
                setattr(node, field, list(self._woven(block, not isinstance(node, _SCOPES))))
        return node

    def _woven(self, block: list[ast.stmt], inside: bool) -> Iterator[ast.stmt]:
        if inside:
            yield _settle()
        for statement in block:
            yield statement
            if isinstance(statement, _CALLING) and any(isinstance(part, ast.Call) for part in ast.walk(statement)):
                yield _settle()


class _WholeCalls(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return _whole(node) if called(node) in _ENDING else node


def _counting(node: ast.expr) -> ast.expr:
    """`not abs(f(3) - want) > 1e-6` would pass with what is no number, which compares with nothing."""
    if not isinstance(node, ast.BinOp) and not (isinstance(node, ast.Call) and called(node) != "len"):
        return node
    return ast.Call(ast.Name("__number__", ast.Load()), [node], [])


def _asks_for_main(node: ast.Compare) -> bool:
    match node:
        case ast.Compare(
            left=ast.Name("__name__") | ast.Constant("__main__") as left,
            ops=[ast.Eq()],
            comparators=[ast.Name("__name__") | ast.Constant("__main__") as right],
        ):
            return type(left) is not type(right)
        case _:
            return False


def _gives_nothing(node: ast.expr) -> bool:
    match node:
        case ast.Compare(left=ast.Call(), ops=[ast.Is() | ast.Eq()], comparators=[ast.Constant(value=None)]):
            return True
        case _:
            return False


def _gives_verdict(node: ast.AST) -> bool:
    """Whether an iterator of the tests asserts, or returns what a comparison says: it must not end with another one."""
    match node:
        case ast.Assert():
            return True
        case ast.Return(value=ast.Compare() | ast.BoolOp() | ast.UnaryOp() as value):
            return any(isinstance(part, ast.Compare) for part in ast.walk(value))
        case _:
            return False


def _settle() -> ast.Expr:
    return _statement(SETTLE)


def _statement(text: str) -> ast.Expr:
    return ast.Expr(ast.parse(text, mode="eval").body)


def _name_of(node: ast.AST) -> str:
    """`"map"` for the expressions `map` and `builtins.map`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def called(node: ast.Call) -> str:
    return _name_of(node.func)


def _ending(node: ast.AST) -> bool:
    return any(_name_of(part) in _ENDING for part in ast.walk(node))


def _raises_stop(node: ast.AST) -> bool:
    raised = [part.exc for part in ast.walk(node) if isinstance(part, ast.Raise) and part.exc is not None]
    return any(_name_of(part) == "StopIteration" for found in raised for part in ast.walk(found))


def _whole(body: ast.expr) -> ast.expr:
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Call(ast.Name("__whole__", ast.Load()), [ast.Lambda(nothing, body)], [])


def _whole_function(function: ast.expr) -> ast.expr:
    made = ast.parse("lambda *a: __whole__(f, *a)", mode="eval").body
    assert isinstance(made, ast.Lambda) and isinstance(made.body, ast.Call)
    made.body.args[0] = function
    return made
