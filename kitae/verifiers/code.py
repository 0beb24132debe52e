"""The verifier of programs: takes the code out of a response and runs it against tests, in a sandbox.

References, as a mapping or as JSON text, with or without `{"tests": …}` around them:

    {"kind": "asserts", "asserts": ["assert f(1) == 2"], "setup": "import math"}
    {"kind": "stdio", "cases": [{"stdin": "1 2\n", "stdout": "3\n"}]}
    {"kind": "check", "prompt": "def f(x):…", "check": "def check(candidate): …", "entry_point": "f"}

How a verdict is made. stdio: the expected output never enters the sandbox; it is compared here. asserts and check: the
tests run in a process of their own that the candidate cannot read, signal or write to, and reach the candidate only by
asking it for plain data (`runners.checker`). So printing, exiting, patching built-ins or the test framework, objects
that equal everything and forged reports all come to nothing.

Who gets what. The code under test sees the prompt of a check; of a setup its imports, its types (`visible_setup` says
which) and nothing else: no function, no value, no test. The tests take from the code under test only what they use and
nobody else defines: not what the setup, the prompt or Python defines, nor `np.allclose` or `isclose` where they forgot
to import them (`_names`).

What remains possible: to guess (`assert is_prime(7)` passes a function that always says True), and to be told: a test
that hands the expected value to a function or an object of the candidate's (`assert f().equals(3)`) can be lied to.
What the separation costs: an instance of a class of the candidate's never equals a value that is not one; arguments
are copies, and lists, dicts, sets and instances of the setup's classes in them are updated after the statement.
`runners.checker` says what of a class or function reaches the tests and what does not.

Tests that cannot import what they need, or raise before they use the code at all, are an error and not a 0: the data or
the machine is at fault. Not seen: a name that neither the tests nor the response define, which counts against it.
"""

import ast
import builtins
import functools
import itertools
import json
import marshal
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from kitae.errors import VerifierError
from kitae.types import Score
from kitae.verifiers.runners.meter import Clock
from kitae.verifiers.sandbox import Limits, Report, SandboxChoice, Session, find_program, open_session
from kitae.verifiers.text import after_thought

_MAX_CODE = 2**20  # characters
_SLACK = 5.0  # seconds that the sandbox may need beyond the candidate's limit
_COMPILE_LIMIT = 30.0
_NATIVE_STACK = 256  # MiB
_MAX_DETAIL = 300


@dataclass(frozen=True, slots=True)
class Language:
    """How a language is recognised and run; words with {braces} are filled in, programs are looked up.

    `reserves`: its runtime reserves far more address space than it uses. `native`: it recurses on the machine's stack.
    """

    tags: tuple[str, ...]
    file: str = ""
    compile: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    reserves: bool = False
    native: bool = False


LANGUAGES: dict[str, Language] = {
    "python": Language(("python", "py", "python3")),
    "bash": Language(("bash", "sh", "shell"), "main.sh", run=("bash", "main.sh")),
    "javascript": Language(("javascript", "js", "node"), "main.js", run=("node", "main.js"), reserves=True),
    "ruby": Language(("ruby", "rb"), "main.rb", run=("ruby", "main.rb")),
    "perl": Language(("perl", "pl"), "main.pl", run=("perl", "main.pl")),
    "php": Language(("php",), "main.php", run=("php", "main.php")),
    "lua": Language(("lua",), "main.lua", run=("lua", "main.lua")),
    "c": Language(("c",), "main.c", ("gcc", "-O2", "-o", "main", "main.c", "-lm"), ("./main",), native=True),
    "cpp": Language(
        ("cpp", "c++", "cc", "cxx"),
        "main.cpp",
        ("g++", "-O2", "-std=c++17", "-o", "main", "main.cpp"),
        ("./main",),
        native=True,
    ),
    "java": Language(
        ("java",),
        "{class}.java",
        ("javac", "-d", ".", "{class}.java"),
        ("java", "-Xmx{heap}m", "-Xss64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "{class}"),
        reserves=True,
    ),
    "go": Language(("go", "golang"), "main.go", ("go", "build", "-o", "main", "main.go"), ("./main",), reserves=True),
    "rust": Language(("rust", "rs"), "main.rs", ("rustc", "-O", "-o", "main", "main.rs"), ("./main",), native=True),
}


@dataclass(frozen=True, slots=True)
class Asserts:
    asserts: tuple[str, ...]
    setup: str


@dataclass(frozen=True, slots=True)
class Stdio:
    cases: tuple[tuple[str, str], ...]  # stdin, stdout


@dataclass(frozen=True, slots=True)
class Check:
    prompt: str
    check: str
    entry_point: str


Tests = Asserts | Stdio | Check


@dataclass(frozen=True, slots=True)
class Source:
    """The code of a response: `Source("print(1)\\n", fenced=True)`. What is not fenced may have prose around it."""

    text: str
    fenced: bool


def code(
    response: str,
    reference: Any,
    context: Mapping[str, Any],
    *,
    language: str = "python",
    reward: Literal["all", "rate"] = "all",
    time_limit: float = 4.0,
    total_limit: float = 9.0,
    memory_mb: int = 1024,
    sandbox: SandboxChoice = "auto",
    packages: bool = False,
) -> Score:
    """1 where the code in the response passes all tests; with `reward="rate"`, the share that it passes.

    `time_limit`: seconds of processor time per test, and twice that on the clock; loading the code counts as a test.
    `total_limit`: seconds for the whole check; tests that do not get their turn count as failed. It must be less than
    the pool's own timeout: for references with many or slow cases raise both, as `kitae verify code --timeout 60
    --option total_limit=55` does. `packages`: let
    Python code import what is installed beside Kitae. Asserts and check functions are for Python alone.
    """
    prepared = prepare(response, reference, language, reward)
    if isinstance(prepared, Score):
        return prepared
    source, tests = prepared
    limits = Limits(
        time_limit=time_limit,
        memory_mb=memory_mb,
        limit_address_space=not LANGUAGES[language].reserves,
        stack_mb=_NATIVE_STACK if LANGUAGES[language].native else 0,
    )
    run = _Run(limits, sandbox, packages, total_limit, Clock())
    try:
        if isinstance(tests, Stdio):
            verdicts = list(_run_cases(run, language, source, tests))
        else:
            verdicts = _run_tests(run, source, tests)
    except VerifierError as error:
        return Score.error(str(error))
    return total_score(verdicts, reward)


def extract_code(response: str, tags: Sequence[str], wanted: Sequence[str] = ()) -> Source:
    """The program in a response: its last fenced block of the language, or of none; the whole text without fences.

    Of several such blocks it is the last that defines one of the `wanted` names, if any does: an example of use often
    follows the solution. What comes before `</think>` is not looked at. A block that is never closed reaches to the
    end. A console session (>>>) is no program. Where there are no blocks, [BEGIN] and [DONE] or <code> make one.
    """
    text = after_thought(response).replace("\r\n", "\n").removeprefix("\ufeff")
    blocks = [(tag, body) for tag, body in _blocks(text) if not body.lstrip().startswith(">>>")]
    if not blocks:
        return _unfenced(text, tags)
    tagged = [body for tag, body in blocks if tag in tags]
    untagged = [body for tag, body in blocks if not tag]
    candidates = tagged or untagged or [body for _, body in blocks]
    chosen = next((body for body in reversed(candidates) if _defines(body, wanted)), candidates[-1])
    return Source(chosen, fenced=True)


def read_tests(reference: Any) -> Tests | str:
    """The tests of a reference, or what is wrong with it."""
    try:
        while isinstance(reference, str):
            reference = json.loads(reference)
    except (ValueError, RecursionError):
        return f"the reference of 'code' must be a mapping or JSON, got {str(reference)[:100]!r}"
    if isinstance(reference, Mapping) and "tests" in reference and "kind" not in reference:
        return read_tests(reference["tests"])
    if not isinstance(reference, Mapping):
        return f"the tests of 'code' must be a mapping, got {str(reference)[:100]!r}"
    match reference.get("kind"):
        case "asserts":
            return _read_asserts(reference)
        case "stdio":
            return _read_stdio(reference)
        case "check":
            return _read_check(reference)
        case kind:
            return f"the kind of tests must be asserts, stdio or check, got {str(kind)[:100]!r}"


def same_output(got: str, want: str) -> bool:
    """Whether two outputs have the same words on the same lines; blank lines and the width of gaps do not matter."""
    return _words(got) == _words(want)


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one test: `Verdict(False, "assert f(1) == 2: AssertionError")`."""

    passed: bool
    detail: str = ""


def plan(source: Source, tests: Asserts | Check) -> tuple[dict[str, Any], dict[str, Any]]:
    """The order that loads the candidate, and the job of the checker, which the candidate must not see."""
    order: dict[str, Any] = {"mode": "check", "loose": not source.fenced}
    if isinstance(tests, Asserts):
        job: dict[str, Any] = {"prompt": "", "setup": settled(tests.setup), "entry_point": ""}
        job |= {"tests": [settled(_as_assert(test)) for test in tests.asserts], **_names(tests.setup, tests.asserts)}
        order |= {"setup": visible_setup(tests.setup), "typing": _typing_names(source.text, tests.setup)}
        return order | {"variants": variants(source)}, job
    names = _names(tests.check, (), tests.entry_point)
    job = {"prompt": tests.prompt if names["names"] or names["library"] else "", "setup": settled(tests.check)}
    job |= {"entry_point": tests.entry_point, "tests": ["check(__candidate__)"], **names}
    order |= {"typing": _typing_names(source.text, tests.prompt)}
    if _defines(source.text, [tests.entry_point]):
        return order | {"setup": [tests.prompt], "variants": variants(source)}, job
    return order | {"setup": [], "variants": _completions(tests.prompt, source.text)}, job


@functools.lru_cache(maxsize=4096)
def settled(text: str) -> str:
    """Tests that call `__settle__()` between statements: what a call changes in its arguments is seen from then on.

    So `assert f(xs) == sorted(xs)` does not sort what f has made of xs.
    """
    try:
        return ast.unparse(_Settle().visit(ast.parse(text)))
    except RecursionError:  # too deep to be written
        return text


class _Settle(ast.NodeTransformer):
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


_SETTLE = "__settle__()"
_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_CALLING = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Assert, ast.Delete, ast.For, ast.While, ast.With)


def _settle() -> ast.stmt:
    return ast.parse(_SETTLE).body[0]


@functools.lru_cache(maxsize=4096)
def visible_setup(setup: str) -> list[str]:
    """What of a setup the code under test sees, statement by statement: imports and types, and what types are made of.

    A type is a class that has bases, decorators, attributes, `__init__` or `__new__`, but no test case; an assignment
    that calls namedtuple, Enum, NewType or the like; or one of nothing but names (`Grid = List[Row]`). A class of
    nothing but functions is none: reference solutions are written that way. What a type uses of the setup's other
    functions and values comes along.
    """
    statements = ast.parse(setup).body
    wanted = {i for i, statement in enumerate(statements) if _is_import(statement) or _is_type(statement)}
    queue = [i for i in sorted(wanted) if not _is_import(statements[i])]
    for i in queue:  # grows on the way
        used = {node.id for node in ast.walk(statements[i]) if isinstance(node, ast.Name)}
        for j, other in enumerate(statements):
            if j not in wanted and isinstance(other, _DEFINING) and used & set(_bound(_surface(other))):
                wanted.add(j)
                queue.append(j)
    return [ast.unparse(statement) for i, statement in enumerate(statements) if i in wanted]


_DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
_TYPE_MAKERS = ("namedtuple", "NamedTuple", "Enum", "IntEnum", "NewType", "TypeVar", "TypedDict", "make_dataclass")
_TYPE_NODES = (ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.Load)


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
    """What a statement itself binds, without what is bound inside a function or class that it defines."""
    return [statement, *(ast.walk(statement) if isinstance(statement, ast.Assign | ast.AnnAssign) else ())]


def take_verdicts(reports: Iterator[Report], tests: Sequence[str]) -> tuple[list[Verdict], Sequence[str]]:
    """What the reports of a checker say of the tests, and which of them it did not come to."""
    loaded = next(reports)
    if loaded.status != "loaded":
        return all_failed(tests, _complaint(loaded)), []
    verdicts: list[Verdict] = []
    for number, test in enumerate(tests):
        report = next(reports)
        if report.status == "error":
            raise VerifierError(report.detail)
        if report.status == "broken":
            return verdicts + all_failed(tests[number:], report.detail), []
        told = _brief(test.replace(_SETTLE, ""))
        verdicts.append(Verdict(report.status == "passed", f"{told}: {_complaint(report)}"))
        if report.status not in ("passed", "failed"):
            return verdicts, tests[number + 1 :]
    return verdicts, []


def judge_case(report: Report, stdout: str, name: str) -> Verdict:
    """Whether a run ended well and printed what it should."""
    output = report.output.decode(errors="replace")
    if report.status == "ended" and not same_output(output, stdout):
        return Verdict(False, f"{name}: wrong output {_brief(output[:1000].strip())!r}")
    return Verdict(report.status == "ended", f"{name}: {_complaint(report)}")


def all_failed(tests: Sequence[Any], reason: str) -> list[Verdict]:
    return [Verdict(False, reason) for _ in tests]


def total_score(verdicts: Sequence[Verdict], reward: str) -> Score:
    rate = sum(verdict.passed for verdict in verdicts) / len(verdicts)
    detail = next((verdict.detail for verdict in verdicts if not verdict.passed), "")
    return Score(rate if reward == "rate" else float(rate == 1), {"pass_rate": rate}, detail=_printable(detail))


def wrong(reason: str) -> Score:
    return Score(0.0, {"pass_rate": 0.0}, detail=reason)


def prepare(response: str, reference: Any, language: str, reward: str) -> tuple[Source, Tests] | Score:
    """The code and its tests; or the score, where something in options, reference or response settles it."""
    if problem := _check_options(language, reward):
        return Score.error(problem)
    tests = read_tests(reference)
    if isinstance(tests, str):
        return Score.error(tests)
    if not isinstance(tests, Stdio) and language != "python":
        return Score.error(f"tests of kind asserts or check must be for language 'python', got {language!r}")
    source = extract_code(response, LANGUAGES[language].tags, _wanted_names(tests))
    if not source.text.strip():
        return wrong("no code in the response")
    if len(source.text) > _MAX_CODE:
        return wrong(f"more than {_MAX_CODE} characters of code")
    return source, tests


@dataclass(frozen=True, slots=True)
class _Run:
    limits: Limits
    sandbox: SandboxChoice
    packages: bool
    total_limit: float
    clock: Clock

    @property
    def left(self) -> float:
        return self.total_limit - self.clock.read()

    def open(self, order: Mapping[str, Any]) -> Session:
        session = open_session(self.sandbox, order, self.limits, self.packages)
        try:
            ready = session.hear(_SLACK * 4, self.clock)
        except EOFError:
            ready = None
        if ready is None or ready.status != "ready":
            words = session.last_words()
            session.close()
            raise VerifierError(f"the sandbox did not start: {words or 'no answer'}")
        return session

    def hear(self, session: Session, limit: float | None = None) -> Report:
        """The warden's next report; "timeout" where it or the whole check is late, "gone" where it has ended."""
        patience = 2 * (self.limits.time_limit if limit is None else limit) + _SLACK
        left = self.left
        try:
            report = session.hear(max(0.0, min(patience, left)), self.clock)
        except EOFError:
            return Report("gone", "the sandbox ended", b"")
        if report is None:
            return Report("timeout", "no time left for the check" if left < patience else "no answer in time", b"")
        return report

    def reports(self, session: Session) -> Iterator[Report]:
        while True:
            yield self.hear(session)


def _run_tests(run: _Run, source: Source, tests: Asserts | Check) -> list[Verdict]:
    """One verdict per test. A test that hangs or kills the candidate costs a sandbox; the next begins in a new one."""
    order, job = plan(source, tests)
    verdicts: list[Verdict] = []
    waiting = job["tests"]
    while waiting and run.left > 0:
        with run.open(order) as session:
            with suppress(EOFError):  # the first report says so too
                session.send(marshal.dumps(job | {"tests": waiting, "time_limit": run.limits.time_limit}))
            found, waiting = take_verdicts(run.reports(session), waiting)
            verdicts += found
    return verdicts + all_failed(waiting, "no time left for the check")


def _run_cases(run: _Run, language: str, source: Source, tests: Stdio) -> Iterator[Verdict]:
    total = len(tests.cases)
    with run.open({"mode": "run", **_program(language, source, run.limits)}) as session:
        loaded = run.hear(session, _COMPILE_LIMIT)
        if loaded.status != "loaded":
            yield from all_failed(tests.cases, f"does not compile: {_complaint(loaded)}")
            return
        for number, (stdin, stdout) in enumerate(tests.cases, 1):
            try:
                session.send(stdin.encode(errors="surrogatepass"))
                report = run.hear(session)
            except EOFError:
                report = Report("gone", "the sandbox ended", b"")
            yield judge_case(report, stdout, f"case {number} of {total}")
            if report.status == "gone" or run.left <= 0:
                yield from all_failed(tests.cases[number:], _complaint(report))
                return


def variants(source: Source) -> list[str]:
    """Readings of a text as a program: as it is; and from its first lines that look like Python."""
    starts = itertools.islice(_CODE_LINE_RE.finditer(source.text), _STARTS)
    return list(dict.fromkeys([source.text, *(source.text[start.start() :] for start in starts)]))


def _typing_names(*texts: str) -> list[str]:
    """Names of `typing` that are used in annotations by code that does not import them."""
    if any("typing" in text for text in texts):
        return []
    return sorted({name for text in texts for name in _TYPING_RE.findall(text)})


def _completions(prompt: str, text: str) -> list[str]:
    """Readings of a text as the rest of a prompt: as it is, on a line of its own, or as a body without indent."""
    indented = "".join(f"    {line}" for line in text.splitlines(keepends=True))
    return [prompt + text, f"{prompt}\n{text}", f"{prompt}\n{indented}"]


def _program(language: str, source: Source, limits: Limits) -> dict[str, Any]:
    """The part of an order that says what to run; `VerifierError` names a program that is not installed."""
    if language == "python":
        readings = {"variants": variants(source), "loose": not source.fenced, "typing": _typing_names(source.text)}
        return {"files": {}, "compile": None, "command": None, **readings}
    entry = LANGUAGES[language]
    found = _JAVA_CLASS_RE.search(source.text)
    fill = {"{class}": found[1] if found else "Main", "{heap}": str(limits.memory_mb * 3 // 4)}

    def words(template: tuple[str, ...]) -> list[str] | None:
        if not template:
            return None
        filled = [functools.reduce(lambda word, key: word.replace(key, fill[key]), fill, word) for word in template]
        program = filled[0] if filled[0].startswith("./") else find_program(filled[0])
        if program is None:
            raise VerifierError(f"language {language!r} needs {filled[0]!r} in /usr/local/bin, /usr/bin or /bin")
        return [program, *filled[1:]]

    file = entry.file.replace("{class}", fill["{class}"])
    return {
        "files": {file: source.text},
        "compile": words(entry.compile),
        "compile_limit": _COMPILE_LIMIT,
        "command": words(entry.run),
        "variants": [],
    }


_TARGET = r"[A-Za-z_][\w.]*(?:\[[^\]\n]*\])?"
_CODE_LINE_RE = re.compile(
    r"^(?:def |class |import |from \w[\w.]* import |@|async def |print\(|(?:for|while|if|with) .*:$|try:$"
    rf"|{_TARGET}(?: ?, ?{_TARGET})* ?[-+*/]?= ?)",
    re.MULTILINE,
)
_STARTS = 3  # lines of a text that are tried as the first of its code
_JAVA_CLASS_RE = re.compile(r"\bpublic\s+(?:final\s+|abstract\s+)*class\s+(\w+)")
_FENCE_RE = re.compile(r"^([ \t>]*)(`{3,}|~{3,})[ \t]*\{?\.?([\w+#-]*)(.*)$")
_LATE_FENCE_RE = re.compile(r"(?<!`)(`{3,})([\w+#-]*)[ \t]*$")  # after other text on its line
_AFTER_FENCE_RE = re.compile(r"[ \t]*$|[ \t]*<|[ \t]+(?!\S+[ \t]*$)")  # no tag: nothing, <|im_end|>, or several words
_TYPING_RE = re.compile(
    r"(?:->|[:\[,|=(])\s*(List|Dict|Tuple|Set|FrozenSet|Optional|Union|Any|Callable|Iterable|Iterator|Sequence|Mapping"
    r"|Generator|Deque|DefaultDict|Counter|NamedTuple|TypeVar|Literal)\b(?=\s*[\[\]:,=)|(]|\s*$)",
    re.MULTILINE,
)


def _unfenced(text: str, tags: Sequence[str]) -> Source:
    end = text.rfind("</code>")
    start = text.rfind("<code", 0, max(end, 0))
    if start >= 0:
        return Source(text[start:end].partition(">")[2], fenced=True)
    said, _, _ = f"\n{text}".partition("\n[DONE]")
    _, begin, said = said.rpartition("\n[BEGIN]")
    if begin:
        return Source(said.removeprefix("\n"), fenced=True)
    first, _, rest = text.partition("\n")
    return Source(rest if first.strip().lower() in tags else said.removeprefix("\n"), fenced=False)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """The fenced blocks of a text as (tag in lower case, body), those in a block of Markdown included.

    A fence may open after text on its line, and close before text, or at the end of a line of code. There it only
    counts where the bare fences that follow pair up without it.
    """
    fence = tag = indent = ""
    body: list[str] = []
    lines = text.split("\n")
    for line, paired in zip(lines, _pairs_follow(lines), strict=True):
        match = _FENCE_RE.match(line) if "```" in line or "~~~" in line else None
        late = _LATE_FENCE_RE.search(line) if "```" in line and line.count("```") == 1 and not match else None
        if not fence:
            if match and "`" not in match[4]:
                indent, fence, tag, body = match[1], match[2], match[3].lower(), []
            elif late:
                indent, fence, tag, body = "", late[1], late[2].lower(), []
        elif match and _closes(match, indent, fence):
            yield from _block(tag, body)
            fence = ""
        elif late and late[1].startswith(fence) and not late[2] and paired:
            yield from _block(tag, [*body, line[: late.start()].removeprefix(indent)])
            fence = ""
        else:
            body.append(line.removeprefix(indent))
    if fence:
        yield from _block(tag, _without_far_fence(body, fence))


def _without_far_fence(body: list[str], fence: str) -> list[str]:
    """Of a block that nothing closed: without what follows its last bare fence, if that pairs with no other one. Models
    indent the closing fence like the code before it."""
    bare = [i for i, line in enumerate(body) if line.strip() == fence]
    return body[: bare[-1]] if len(bare) % 2 else body


def _block(tag: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    body = "\n".join(lines) + "\n"
    inner = list(_blocks(body)) if tag in ("markdown", "md") else []
    yield from inner or [(tag, body)]


def _closes(match: re.Match[str], indent: str, fence: str) -> bool:
    """Whether a line that begins with a fence closes a block; one further in belongs to a string or a comment."""
    after = match.string[match.end(2) :]
    return match[2].startswith(fence) and len(match[1]) < len(indent) + 4 and bool(_AFTER_FENCE_RE.match(after))


def _pairs_follow(lines: Sequence[str]) -> list[bool]:
    """For each line, whether an even number of bare fences follows it before the next one with a tag."""
    even, found = True, []
    for line in reversed(lines):
        found.append(even)
        match = _FENCE_RE.match(line) if "```" in line or "~~~" in line else None
        if match and len(match[1]) < 4:
            even = True if match[3] else not even
    return found[::-1]


def _defines(source: str, names: Sequence[str]) -> bool:
    """Whether a line at the left margin defines one of the names: `f = f(3)` and imports from elsewhere do not."""
    for name in names:
        word = re.escape(name)
        if re.search(
            rf"^(?:(?:async\s+)?def\s+{word}\b|class\s+{word}\b|{word}\s*(?::[^=\n]*)?=(?!=)(?!.*\b{word}\b))",
            source,
            re.MULTILINE,
        ):
            return True
        imports = re.finditer(rf"^(?:from|import)\s+(\w+).*\b{word}\b", source, re.MULTILINE)
        if any(found[1] in sys.stdlib_module_names for found in imports):
            return True
    return False


def _wanted_names(tests: Tests) -> list[str]:
    match tests:
        case Check():
            return [tests.entry_point]
        case Asserts():
            found = _names(tests.setup, tests.asserts)
            return [name for name in found["names"] if name not in found["library"]]
        case Stdio():
            return []


# What tests use without importing it: they were written for a file that the code under test begins.
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
    }.items()
    for name in names.split()
}


@functools.lru_cache(maxsize=4096)
def _names(setup: str, asserts: tuple[str, ...], entry_point: str = "") -> dict[str, Any]:
    """Where tests take names from that they do not define, decided by the tests alone.

    `library`: names of well-known functions and types, and of modules where only attributes of theirs are used that
    they really have (the checker looks); `aliases` of them are packages. `names`: the candidate's. `shadows`: those of
    them that hide something of Python's or of the library's. Such a name is the candidate's only where the tests use
    nothing else that could be: in `assert sum(10, 15) == 6`, but not in `assert abs(f(2) - 4) < 1e-6`. Of several it
    is the innermost call. `imports`: what the tests import. `constants`: their texts, where they run any.
    """
    nodes = [node for text in (setup, *asserts) for node in ast.walk(ast.parse(text))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    loads = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    read: dict[str, list[str]] = {}  # attributes by name
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            read.setdefault(node.value.id, []).append(node.attr)
    bound = {*_bound(nodes), "__name__", "__file__"}
    free = set(loads) - bound
    packages = free & {*_ALIASES, *sys.stdlib_module_names}
    modules = {name for name in packages if len(read.get(name, ())) == loads[name]}
    known = (free & {*_LIBRARY, *vars(builtins)}) - {entry_point}
    shadows: set[str] = set()
    if not free - known - modules and not entry_point:
        inner = [node for node in calls if not any(isinstance(n, ast.Call) for n in ast.walk(node) if n is not node)]
        shadows = {node.func.id for node in inner if isinstance(node.func, ast.Name)} & known
    library = {name: (_ALIASES.get(name, name), sorted(set(read[name]))) for name in modules}
    library |= {name: (f"{_LIBRARY[name]}:{name}", []) for name in (known & set(_LIBRARY)) - shadows - modules}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {
        "library": library,
        "aliases": sorted(modules & set(_ALIASES)),
        "names": sorted((free - set(library) - set(vars(builtins))) | shadows | (modules - set(_ALIASES))),
        "shadows": sorted(shadows),
        "imports": sorted(_imports(nodes)),
        "constants": sorted(texts) if {"eval", "exec", "compile"} & set(loads) else [],
    }


def _imports(nodes: Sequence[ast.AST]) -> set[str]:
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in found}


def _bound(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Names that the tests define themselves."""
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.alias(name=name, asname=other):
                yield other or name.partition(".")[0]


def _as_assert(test: str) -> str:
    """A bare comparison would pass whatever it says."""
    body = ast.parse(test).body
    if len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Compare):
        return f"assert ({test.strip()}\n)"
    return test


def _read_asserts(tests: Mapping[str, Any]) -> Asserts | str:
    asserts, setup = tests.get("asserts"), tests.get("setup") or ""
    if not isinstance(asserts, Sequence) or isinstance(asserts, str) or not asserts:
        return f"asserts must be a list with at least one test, got {str(asserts)[:100]!r}"
    if not all(isinstance(text, str) and text.strip() for text in [*asserts, setup or "#"]):
        return "asserts and setup must be texts of Python"
    return _bad_python([setup, *asserts]) or Asserts(tuple(asserts), setup)


def _read_stdio(tests: Mapping[str, Any]) -> Stdio | str:
    cases = tests.get("cases")
    if not isinstance(cases, Sequence) or isinstance(cases, str) or not cases:
        return f"cases must be a list with at least one case, got {str(cases)[:100]!r}"
    pairs = []
    for case in cases:
        if not isinstance(case, Mapping) or "stdout" not in case:
            return f"a case must have stdin and stdout, got {str(case)[:100]!r}"
        pair = (case.get("stdin") or "", case["stdout"])
        if not all(isinstance(text, str) for text in pair):
            return f"stdin and stdout of a case must be texts, got {str(case)[:100]!r}"
        pairs.append(pair)
    return Stdio(tuple(pairs))


def _read_check(tests: Mapping[str, Any]) -> Check | str:
    prompt, check, entry_point = tests.get("prompt") or "", tests.get("check"), tests.get("entry_point")
    if not isinstance(entry_point, str) or not entry_point.isidentifier():
        return f"entry_point must be the name of a function, got {str(entry_point)[:100]!r}"
    if not isinstance(prompt, str) or not isinstance(check, str):
        return "prompt and check must be texts of Python"
    if problem := _bad_python([check]):
        return problem
    if "check" not in _bound(list(ast.walk(ast.parse(check)))):
        return "check must define a function check(candidate)"
    return Check(prompt, check, entry_point)


def _bad_python(texts: Sequence[str]) -> str:
    for text in texts:
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return f"the tests must be Python, but {_brief(text)!r} is not: {error}"
    return ""


def _check_options(language: str, reward: str) -> str:
    if language not in LANGUAGES:
        return f"language must be one of {', '.join(LANGUAGES)}, got {language!r}"
    if reward not in ("all", "rate"):
        return f"reward must be 'all' or 'rate', got {reward!r}"
    return ""


def _complaint(report: Report) -> str:
    match report.status:
        case "timeout":
            return f"out of time ({report.detail})"
        case "output":
            return "too much output"
        case _:
            return report.detail or report.status


def _words(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.split())]


def _brief(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_DETAIL else line[:_MAX_DETAIL] + "…"


def _printable(text: str) -> str:
    return text.encode(errors="replace").decode()
