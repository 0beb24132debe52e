"""Analysis of the text of tests: where their names come from, which part of their setup the code under test may see,
and which tests are refused.
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
from kitae.verifiers.code.weaving import called

_DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
_TYPE_MAKERS = ("namedtuple", "NamedTuple", "Enum", "IntEnum", "NewType", "TypeVar", "TypedDict", "make_dataclass")
_TYPE_NODES = (ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.Load)


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


@functools.lru_cache(maxsize=16)
def _nodes(setup: str, asserts: tuple[str, ...]) -> list[ast.AST]:
    return [node for text in (setup, *asserts) for node in ast.walk(ast.parse(text))]


@functools.lru_cache(maxsize=4096)
def names_of(setup: str, asserts: tuple[str, ...], entry_point: str) -> Names:
    """Where the names come from that tests use without defining them, decided by the tests alone.

    `library`: names of well-known functions and types, and of modules if only attributes that they really have are used
    (the checker verifies this); `aliases`: those of them that are packages. `names`: those of the candidate. `shadows`:
    those of them that hide a name of Python or of the library. Such a name is the candidate's only if the tests use
    nothing else that could be: in `assert sum(10, 15) == 6`, but not in `assert abs(f(2) - 4) < 1e-6`; of several, the
    innermost call counts. `imports`: what the tests import.
    """
    nodes = _nodes(setup, asserts)
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
        if isinstance(node, ast.Call) and called(node) in ("eval", "exec", "timeit", "repeat", "Timer")
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
def refusal(setup: str, asserts: tuple[str, ...], entry_point: str) -> str:
    """Why tests cannot be judged: they run text of the code under test as a program, beside the values that they
    expect; or they leave the verdict to a function that nobody defines, which the code would bring along. Or ""."""
    nodes = _nodes(setup, asserts)
    for name in sorted(_imported(nodes) & _RUNNERS):
        return f"the tests must not run what the response wrote as a program, but use {name}"
    found = names_of(setup, asserts, entry_point)
    theirs = set(found["names"]) - set(found["library"])
    foreign = _made_of(nodes, theirs | {entry_point} | _parameters(nodes, entry_point))
    for node in nodes:
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name, told = called(node), foreign & {name for argument in node.args for name in _names_in(argument)}
        if name in theirs and _JUDGE_RE.fullmatch(name) and told - {name}:
            return f"the tests must define or import {name!r}, which gives the verdict"
        if _runs(node) and not isinstance(node.args[0], ast.JoinedStr) and foreign & _names_in(node.args[0]):
            text = f"{name}({ast.unparse(node.args[0])[:100]})"
            return f"the tests must not run what the response wrote as a program, but call {text}"
    return ""


def _runs(node: ast.Call) -> bool:
    """Whether a call runs its first argument as a program, or imports what it names."""
    name = called(node)
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
