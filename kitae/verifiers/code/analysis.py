"""Analysis of the text of tests: where their names come from, which part of their setup the code under test may see,
and where changes of arguments become visible.
"""

import ast
import builtins
import functools
import keyword
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from kitae.sandbox.sandbox_jobs import Names

SETTLE = "__settle__()"
_ENDING = {"next", "__next__", "send", "throw"}  # what may raise StopIteration on purpose
_CALLERS = {"map", "filter", "filterfalse", "starmap", "takewhile", "dropwhile", "accumulate", "partial"}
_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_CALLING = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Assert, ast.Delete, ast.For, ast.While, ast.With)
_DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
_TYPE_MAKERS = ("namedtuple", "NamedTuple", "Enum", "IntEnum", "NewType", "TypeVar", "TypedDict", "make_dataclass")
_TYPE_NODES = (ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.Load)


@functools.lru_cache(maxsize=4096)
def settled(text: str) -> str:
    """Tests whose statements mean what they say, whatever the code under test does.

    `__settle__()` stands between statements: from there on changes of a call's arguments are visible, so that
    `assert f(xs) == sorted(xs)` does not sort what f has made of xs. A StopIteration does not leave a function, a
    lambda, or `next` as an argument of `map`, as it does not leave a generator: it would end the loop that calls them,
    and `all(map(lambda x: next(it) == x, xs))` would pass.
    """
    try:
        return ast.unparse(_Settle().visit(ast.parse(text)))
    except RecursionError:  # nested too deeply to be unparsed
        return text


class _Settle(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        ends = node.name != "__next__" and _ending(node) and not _raises_stop(node)
        self.generic_visit(node)
        if node.name == "__next__" and any(map(_gives_verdict, ast.walk(node))):
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
        if ast.unparse(node) in ("__name__ == '__main__'", "'__main__' == __name__"):
            return ast.Constant(True)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = _called(node)
        if name in _CALLERS:
            node.args = [_whole_function(a) if _name_of(a) in _ENDING else a for a in node.args]
        return node

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
        return _whole(node) if _called(node) in _ENDING else node


def _gives_verdict(node: ast.AST) -> bool:
    """Whether an iterator of the tests asserts, or returns what a comparison says: it must not end with another one."""
    match node:
        case ast.Assert():
            return True
        case ast.Return(value=ast.Compare() | ast.BoolOp() | ast.UnaryOp() as value):
            return any(isinstance(part, ast.Compare) for part in ast.walk(value))
        case _:
            return False


def _settle() -> ast.stmt:
    return ast.parse(SETTLE).body[0]


def _name_of(node: ast.AST) -> str:
    """`"map"` for the expressions `map` and `builtins.map`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _called(node: ast.Call) -> str:
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


@functools.lru_cache(maxsize=4096)
def visible_setup(setup: str) -> list[str]:
    """The statements of a setup that the code under test sees: imports and types, and what types need.

    A type is a class that has bases, decorators, attributes, `__init__` or `__new__`, but is no test case; an
    assignment that calls namedtuple, Enum, NewType or the like; or an assignment of nothing but names (`Grid =
    List[Row]`). A class that only has functions is none, because reference solutions are written that way. The setup's
    functions and values that a type uses are included.
    """
    statements = ast.parse(setup).body
    wanted = {i for i, statement in enumerate(statements) if _is_import(statement) or _is_type(statement)}
    queue = [i for i in sorted(wanted) if not _is_import(statements[i])]
    for i in queue:  # the queue grows meanwhile
        used = {node.id for node in ast.walk(statements[i]) if isinstance(node, ast.Name)}
        for j, other in enumerate(statements):
            if j not in wanted and isinstance(other, _DEFINING) and used & set(names_bound(_surface(other))):
                wanted.add(j)
                queue.append(j)
    return [ast.unparse(statement) for i, statement in enumerate(statements) if i in wanted]


def _is_import(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Try):
        return all(map(_is_import, statement.body))
    return isinstance(statement, ast.Import | ast.ImportFrom)


def _is_type(statement: ast.stmt) -> bool:
    match statement:
        case ast.ClassDef(bases=bases, body=body):
            if any("Test" in ast.unparse(base) for base in bases):
                return False
            made = [f for f in body if isinstance(f, ast.FunctionDef) and f.name in ("__init__", "__new__")]
            fields = [part for part in body if isinstance(part, ast.Assign | ast.AnnAssign)]
            based = [base for base in bases if ast.unparse(base) != "object"]
            return bool(made or fields or based or statement.decorator_list or statement.keywords)
        case ast.Assign(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
            return name in _TYPE_MAKERS
        case ast.Assign(value=value):
            return all(isinstance(node, _TYPE_NODES) for node in ast.walk(value))
        case _:
            return False


def _surface(statement: ast.stmt) -> list[ast.AST]:
    """The nodes by which a statement itself binds names, without those inside a function or class that it defines."""
    return [statement, *(ast.walk(statement) if isinstance(statement, ast.Assign | ast.AnnAssign) else ())]


# What tests use without importing it, as they were written for a file that begins with the code under test.
_ALIASES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas", "pytest": "pytest", "torch": "torch"}
_LIBRARY = {
    name: module
    for module, names in {
        "math": "isclose sqrt pi inf nan isnan isinf ceil floor",
        "collections": "Counter defaultdict deque OrderedDict namedtuple",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "datetime": "datetime date timedelta timezone",
        "copy": "deepcopy",
        "functools": "reduce partial cmp_to_key",
        "itertools": "chain islice",
        "dataclasses": "dataclass",
        "enum": "Enum",
        "pathlib": "Path",
        "uuid": "UUID",
        "io": "StringIO BytesIO",
        "contextlib": "redirect_stdout suppress",
        "typing": "Any Dict List Optional Set Tuple Union Callable Iterable Iterator Sequence",
        "unittest": "TestCase",
        "unittest.mock": "patch MagicMock Mock",
        "pytest": "approx raises",
        "numpy": "allclose array_equal",
        "numpy.testing": "assert_allclose assert_almost_equal assert_approx_equal assert_array_almost_equal "
        "assert_array_equal assert_array_less assert_equal assert_raises",
        "pandas.testing": "assert_frame_equal assert_index_equal assert_series_equal",
    }.items()
    for name in names.split()
}


@functools.lru_cache(maxsize=4096)
def names_of(setup: str, asserts: tuple[str, ...], entry_point: str = "") -> Names:
    """Where the names come from that tests use without defining them, decided by the tests alone.

    `library`: names of well-known functions and types, and of modules if only attributes that they really have are used
    (the checker verifies this); `aliases`: those of them that are packages. `names`: those of the candidate. `shadows`:
    those of them that hide a name of Python or of the library. Such a name is the candidate's only if the tests use
    nothing else that could be: in `assert sum(10, 15) == 6`, but not in `assert abs(f(2) - 4) < 1e-6`; of several, the
    innermost call counts. `imports`: what the tests import.
    """
    nodes = [node for text in (setup, *asserts) for node in ast.walk(ast.parse(text))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    loads = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    read: dict[str, list[str]] = {}  # the attributes used of each name
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            read.setdefault(node.value.id, []).append(node.attr)
    bound = {*names_bound(nodes), "__name__", "__file__"}
    free = (set(loads) | _called_in_texts(nodes)) - bound
    packages = free & {*_ALIASES, *sys.stdlib_module_names}
    modules = {name for name in packages if len(read.get(name, ())) == loads[name]}
    known = (free & {*_LIBRARY, *vars(builtins)}) - {entry_point}
    shadows: set[str] = set()
    if not free - known - modules and not entry_point:
        inner = [node for node in calls if not any(isinstance(n, ast.Call) for n in ast.walk(node) if n is not node)]
        shadows = {node.func.id for node in inner if isinstance(node.func, ast.Name)} & known
    library = {name: (_ALIASES.get(name, name), sorted(set(read[name]))) for name in modules}
    library |= {name: (f"{_LIBRARY[name]}:{name}", []) for name in (known & set(_LIBRARY)) - shadows - modules}
    return {
        "library": library,
        "aliases": sorted(modules & set(_ALIASES)),
        "names": sorted((free - set(library) - set(vars(builtins))) | shadows | (modules - set(_ALIASES))),
        "shadows": sorted(shadows),
        "imports": sorted(_imports(nodes)),
    }


def _called_in_texts(nodes: Sequence[ast.AST]) -> set[str]:
    """What is called in texts that tests run: `{"f"}` for `eval("f(x)")`."""
    texts = [
        part.value
        for node in nodes
        if isinstance(node, ast.Call) and _called(node) in ("eval", "exec", "timeit", "repeat", "Timer")
        for argument in (*node.args[:2], *(word.value for word in node.keywords if word.arg in ("stmt", "setup")))
        for part in ast.walk(argument)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    names = {name for text in texts for name in re.findall(r"(?<![\w.])(?<!def )([^\W\d]\w*)\(", text)}
    return names - {*keyword.kwlist, *vars(builtins)}


# Tools that do nothing but run what somebody else wrote: the tests' values would be beside it.
_RUNNERS = {"doctest", "runpy", "code", "codeop", "pdb", "bdb", "zipimport", "imp", "logging.config"}
_RUNNING = {"exec", "compile", "__import__", "import_module", "runctx", "exec_module", "load_module"}
_BUILT_IN = {"exec", "compile", "__import__"}  # `re.compile` is another
_JUDGE_RE = re.compile(
    r"_*(assert|expect)\w*|(eq|ok)_|(check_?|is_?)?(almost|nearly|approx|all)?_?(equal|close)s?", re.I
)


@functools.lru_cache(maxsize=4096)
def refusal(setup: str, asserts: tuple[str, ...], entry_point: str = "") -> str:
    """Why tests cannot be judged: they run text of the code under test as a program, beside the values that they
    expect; or they leave the verdict to a function that nobody defines, which the code would bring along. Or ""."""
    nodes = [node for text in (setup, *asserts) for node in ast.walk(ast.parse(text))]
    for name in sorted(_imported(nodes) & _RUNNERS):
        return f"the tests must not run what the response wrote as a program, but use {name}"
    found = names_of(setup, asserts, entry_point)
    theirs = set(found["names"]) - set(found["library"])
    foreign = _made_of(nodes, theirs | {entry_point} | _parameters(nodes, entry_point))
    for node in nodes:
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name, told = _called(node), foreign & {name for argument in node.args for name in _names_in(argument)}
        if name in theirs and _JUDGE_RE.fullmatch(name) and told - {name}:
            return f"the tests must define or import {name!r}, which gives the verdict"
        if _runs(node) and not isinstance(node.args[0], ast.JoinedStr) and foreign & _names_in(node.args[0]):
            text = f"{name}({ast.unparse(node.args[0])[:100]})"
            return f"the tests must not run what the response wrote as a program, but call {text}"
    return ""


def _runs(node: ast.Call) -> bool:
    """Whether a call runs its first argument as a program, or imports what it names."""
    name = _called(node)
    of_python = isinstance(node.func, ast.Name) or "builtins" in ast.unparse(node.func)
    return name in _RUNNING and (of_python or name not in _BUILT_IN)


def _parameters(nodes: Sequence[ast.AST], entry_point: str) -> set[str]:
    """The parameter of `check` that is the function under test."""
    checks = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "check" and entry_point]
    return {argument.arg for node in checks for argument in node.args.args}


def _made_of(nodes: Sequence[ast.AST], names: set[str]) -> set[str]:
    """These names and those to which something is assigned that is made with them."""
    pairs: list[tuple[ast.AST, ast.AST]] = []
    for node in nodes:
        match node:
            case ast.Assign(targets=targets, value=value):
                pairs += [(target, value) for target in targets]
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                pairs.append((target, value))
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                pairs.append((target, value))
    found = set(names)
    while more := {n for target, value in pairs if found & _names_in(value) for n in _names_in(target)} - found:
        found |= more
    return found


def _names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _imported(nodes: Sequence[ast.AST]) -> set[str]:
    """The modules that tests import: `{"logging", "logging.config"}` for `from logging import config`."""
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _imports(nodes: Sequence[ast.AST]) -> set[str]:
    return {name.partition(".")[0] for name in _imported(nodes)}


def names_bound(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """The names that the tests define themselves."""
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.alias(name=name, asname=other):
                yield other or name.partition(".")[0]


def as_assert(test: str) -> str:
    """Make a bare comparison an assertion, as it would pass otherwise."""
    body = ast.parse(test).body
    if len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Compare):
        return f"assert ({test.strip()}\n)"
    return test
