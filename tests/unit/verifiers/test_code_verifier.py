"""The verifier of programs: extraction, references, verdicts. Attacks are in tests/integration."""

# ruff: noqa: E501 - programs of one line each
import json
import shutil
import socket
import types
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.sandbox.backends import find_program
from kitae.sandbox.inside.port import CheckerPort, Gone
from kitae.sandbox.inside.usage import Usage
from kitae.types import Score
from kitae.verifiers.code.analysis import visible_setup
from kitae.verifiers.code.code_verifier import code
from kitae.verifiers.code.extraction import extract_code
from kitae.verifiers.code.references import Asserts, CheckFunction, Stdio, read_tests
from kitae.verifiers.code.verdicts import same_output

needs_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
PYTHON = ("python", "py", "python3")


@pytest.mark.parametrize(
    ("response", "want"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```", "x = 1\n"),
        ("```Python\nx = 1\n```", "x = 1\n"),
        ("```python3 title='a'\nx = 1\n```", "x = 1\n"),
        ("```{python}\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```python\nx = 1\n```\nthen\n```python\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\nOutput:\n```\n1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nRun it:\n```bash\npython x.py\n```", "x = 1\n"),
        ("```text\nidea\n```\n```\nx = 1\n```", "x = 1\n"),
        ("```js\nx\n```", "x\n"),
        ("```python\nx = 1", "x = 1\n"),
        ("1. First:\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("```python\r\nx = 1\r\n```", "x = 1\n"),
        ("<think>```python\nx = 1\n```</think>\n```python\nx = 2\n```", "x = 2\n"),
        ("x = 1\ny = 2", "x = 1\ny = 2"),
        ("    return x", "    return x"),
        ("これは解です。\n```python\nx = '日本'\n```\n以上", "x = '日本'\n"),
        ("Use `x` and ```inline``` code", "Use `x` and ```inline``` code"),
        ("```python\n```", "\n"),
        ("", ""),
        ("```python\nx = 1```", "x = 1\n"),
        ("```python\nx = 1```\nOutput:\n```\n1\n```", "x = 1\n"),
        ("Here is ```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```<|im_end|>", "x = 1\n"),
        ("```python\nx = 1\n``` This is it.\nBye", "x = 1\n"),
        ("> ```python\n> if x:\n>     y\n> ```", "if x:\n    y\n"),
        ("````markdown\n```python\nx = 1\n```\n````", "x = 1\n"),
        ("```python\nx = 1\n```\nTry it:\n```python\n>>> x\n1\n```", "x = 1\n"),
        (
            "```python\ndef f():\n    '''\n    ```\n    f()\n    ```\n    Or: ```\n    '''\n```",
            "def f():\n    '''\n    ```\n    f()\n    ```\n    Or: ```\n    '''\n",
        ),
        ("```python\ns = '''\n```'''\n```", "s = '''\n```'''\n"),
        ("[BEGIN]\nx = 1\n[DONE]\nNext: [BEGIN]", "x = 1"),
        ("x = 1\n[DONE]\n[BEGIN]\ny\n[DONE]", "x = 1"),
        ("<pre><code class='python'>x = 1</code></pre>", "x = 1"),
        ("python\nx = 1", "x = 1"),
        ("\ufeffx = 1", "x = 1"),
        ("<think>```python\nx = 1\n```", ""),
    ],
)
def test_extract_code(response: str, want: str) -> None:
    assert extract_code(response, PYTHON).text == want


def test_extract_prefers_the_block_that_defines_what_is_tested() -> None:
    response = "```python\ndef f(x):\n    return x\n```\nExample:\n```python\nprint(f(1))\n```"
    assert extract_code(response, PYTHON, ["f"]).text == "def f(x):\n    return x\n"
    assert extract_code(response, PYTHON, ["g"]).text == "print(f(1))\n"
    imported = response + "\n```python\nfrom solution import f\nf = f(3)\n```"
    assert extract_code(imported, PYTHON, ["f"]).text == "def f(x):\n    return x\n"
    library = response + "\n```python\nfrom math import gcd as f\n```"
    assert extract_code(library, PYTHON, ["f"]).text == "from math import gcd as f\n"
    both = response + "\n```python\nf = lambda x: 2\n```"
    assert extract_code(both, PYTHON, ["f"]).text == "f = lambda x: 2\n"


ASSERTS = {"kind": "asserts", "asserts": ["assert f(1) == 2"], "setup": ""}
STDIO = {"kind": "stdio", "cases": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "4 5", "stdout": "9"}]}
CHECK = {
    "kind": "check",
    "prompt": 'def f(x: int) -> int:\n    """Add one."""\n',
    "check": "def check(candidate):\n    assert candidate(1) == 2\n",
    "entry_point": "f",
}


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"tests": t}, json.dumps, lambda t: json.dumps({"tests": t})])
def test_read_tests_with_and_without_wrapping(wrap: Any) -> None:
    assert read_tests(wrap(ASSERTS)) == Asserts(("assert f(1) == 2",), "")
    assert read_tests(wrap(STDIO)) == Stdio((("1 2\n", "3\n"), ("4 5", "9")))
    assert read_tests(wrap(CHECK)) == CheckFunction(CHECK["prompt"], CHECK["check"], "f")
    assert read_tests({"tests": json.dumps(ASSERTS)}) == read_tests(ASSERTS)


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        (None, "mapping"),
        ("not json", "JSON"),
        ("[" * 100_000, "JSON"),
        (12, "mapping"),
        ([], "mapping"),
        ({}, "asserts, stdio, check or calls"),
        ({"tests": {}}, "asserts, stdio, check or calls"),
        ({"kind": "unit"}, "got 'unit'"),
        ({"kind": "asserts"}, "at least one"),
        ({"kind": "asserts", "asserts": []}, "at least one"),
        ({"kind": "asserts", "asserts": "assert f(1)"}, "at least one"),
        ({"kind": "asserts", "asserts": [1]}, "texts"),
        ({"kind": "asserts", "asserts": ["  "]}, "texts"),
        ({"kind": "asserts", "asserts": ["assert f("]}, "must be Python"),
        ({"kind": "asserts", "asserts": ["assert f()"], "setup": "import"}, "must be Python"),
        ({"kind": "asserts", "asserts": ["assert f()"], "setup": 3}, "texts"),
        ({"kind": "stdio"}, "at least one"),
        ({"kind": "stdio", "cases": []}, "at least one"),
        ({"kind": "stdio", "cases": ["1"]}, "stdin and stdout"),
        ({"kind": "stdio", "cases": [{"stdin": "1"}]}, "stdin and stdout"),
        ({"kind": "stdio", "cases": [{"stdin": 1, "stdout": "1"}]}, "texts"),
        ({"kind": "check", "check": "def check(c): pass"}, "entry_point"),
        ({"kind": "check", "check": "def check(c): pass", "entry_point": "a b"}, "entry_point"),
        ({"kind": "check", "entry_point": "f"}, "texts"),
        ({"kind": "check", "check": "def test(c): pass", "entry_point": "f"}, "define a function check"),
        ({"kind": "check", "check": "def check(", "entry_point": "f"}, "must be Python"),
    ],
)
def test_a_bad_reference_is_an_error(reference: Any, says: str) -> None:
    score = code("x = 1", reference, {})
    assert score.outcome == "error"
    assert says in score.detail


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"language": "cobol"}, "language must be one of"),
        ({"reward": "some"}, "'all' or 'rate'"),
        ({"sandbox": "docker"}, "sandbox must be one of"),
        ({"language": "bash"}, "must be for language 'python'"),
    ],
)
def test_a_bad_option_is_an_error(options: Any, says: str) -> None:
    score = code("x = 1", ASSERTS, {}, **options)
    assert score.outcome == "error"
    assert says in score.detail


@pytest.mark.parametrize(
    ("got", "want", "same"),
    [
        ("3\n", "3", True),
        ("3", "3\n\n", True),
        ("  3  \n", "3", True),
        ("1 2\n3", "1  2\r\n3\r\n", True),
        ("1\n\n2", "1\n2", True),
        ("a\tb", "a b", True),
        ("", "\n", True),
        ("1 2 3", "1\n2\n3", False),
        ("12", "1 2", False),
        ("3.0", "3", False),
        ("Yes", "YES", False),
        ("", "0", False),
    ],
)
def test_same_output(got: str, want: str, same: bool) -> None:
    assert same_output(got, want) is same


def check(source: str, reference: Any, **options: Any) -> Score:
    score = code(source, reference, {}, **options)
    assert score.outcome == "scored", score.detail
    return score


def asserts(*tests: str, setup: str = "") -> dict[str, Any]:
    return {"tests": {"kind": "asserts", "asserts": list(tests), "setup": setup}}


PASSING = {
    "plain": ("def f(x): return x + 1", asserts("assert f(1) == 2")),
    "bare comparison": ("def f(x): return x + 1", asserts("f(1) == 2")),
    "loop of asserts": ("def f(x): return x + 1", asserts("for i in range(200):\n    assert f(i) == i + 1")),
    "own imports": ("import math\ndef f(x): return math.sqrt(x)", asserts("assert math.isclose(f(4), 2)")),
    "from import": ("from math import isclose\ndef f(x): return x", asserts("assert isclose(f(2.0), 2)")),
    "setup import": ("def f(x): return x / 3", asserts("assert math.isclose(f(1), 1/3)", setup="import math")),
    "setup for the code": ("def f(x): return math.floor(x)", asserts("assert f(1.5) == 1", setup="import math")),
    "class of the candidate": (
        "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\ndef f(ps): return max(p.b - p.a for p in ps)",
        asserts("assert f([Pair(1, 2), Pair(3, 7)]) == 4"),
    ),
    "setup builds on the candidate": (
        "class Node:\n    def __init__(self, v): self.v = v; self.left = self.right = None\n"
        "def height(n): return 0 if n is None else 1 + max(height(n.left), height(n.right))",
        asserts("assert height(root) == 2", setup="root = Node(1)\nroot.left = Node(2)"),
    ),
    "class of the setup": (
        "def f(n):\n    out = None\n    while n:\n        n.next, out, n = out, n, n.next\n    return out",
        asserts(
            "r = f(Node(1, Node(2)))\nassert (r.v, r.next.v, r.next.next) == (2, 1, None)",
            setup="class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next",
        ),
    ),
    "solution class": (
        "class Solution:\n    def add(self, a, b): return [a, b]",
        asserts("assert Solution().add(1, 2) == [1, 2]"),
    ),
    "operators of a class": (
        "class V:\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return V(s.x + o.x)\n    def __mul__(s, k): return V(s.x * k)\n"
        "    def __eq__(s, o): return s.x == o.x\n    def __len__(s): return s.x\n    def __getitem__(s, i): return i * s.x",
        asserts(
            "assert V(1) + V(2) == V(3)",
            "assert (V(2) * 3).x == 6",
            "assert len(V(4)) == 4",
            "assert V(2)[5] == 10",
            "assert isinstance(V(1), V) and not isinstance(3, V)",
        ),
    ),
    "changes its argument": (
        "def f(a, d, s):\n    a.sort(); d['k'] = [1]; s.add(9)",
        asserts(
            "a, d, s = [3, 1], {}, {1}\nassert f(a, d, s) is None\nassert (a, d, s) == ([1, 3], {'k': [1]}, {1, 9})"
        ),
    ),
    "function as argument": (
        "def f(g, xs): return [g(x) for x in xs]",
        asserts("assert f(lambda x: x * 2, [1, 2]) == [2, 4]", "assert f(len, ['ab']) == [2]"),
    ),
    "iterator as argument": ("def f(xs): return sum(xs)", asserts("assert f(i for i in range(4)) == 6")),
    "returns a function": ("def f(n): return lambda x: x + n", asserts("assert f(2)(3) == 5")),
    "generator": ("def f(n):\n    yield from range(n)", asserts("assert list(f(1000)) == list(range(1000))")),
    "lazy generator": (
        "def f():\n    yield 1\n    yield 2\n    raise ValueError('late')",
        asserts("g = f()\nassert (next(g), next(g)) == (1, 2)"),
    ),
    "coroutine": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1",
        asserts("assert asyncio.run(f(1)) == 2"),
    ),
    "exception": (
        "def f(x):\n    raise ValueError('bad x')",
        asserts("try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'bad x'"),
    ),
    "own exception": (
        "class Bad(KeyError): pass\ndef f(x):\n    raise Bad(x)",
        asserts("try:\n    f(1)\n    assert False\nexcept Bad as e:\n    assert e.args == (1,)"),
    ),
    "standard types": (
        "from collections import Counter, deque, OrderedDict, defaultdict\nfrom decimal import Decimal\n"
        "from fractions import Fraction\nimport datetime\ndef f(i):\n"
        "    return [Counter('aab'), deque([1, 2]), OrderedDict(a=1), Decimal('0.1'), Fraction(1, 3),\n"
        "            datetime.date(2020, 2, 29), {1, 2}.union([3]), frozenset([1]), b'\\xff', 1j, range(3), None, ..., {1: 2}.keys()][i]",
        asserts(
            "assert f(0) == {'a': 2, 'b': 1}",
            "assert list(f(1)) == [1, 2]",
            "assert f(2) == {'a': 1}",
            "assert str(f(3)) == '0.1'",
            "assert f(4) * 3 == 1",
            "assert f(5).day == 29",
            "assert f(6) == {1, 2, 3}",
            "assert f(7) == frozenset([1])",
            "assert f(8) == b'\\xff'",
            "assert f(9) == 1j",
            "assert f(10) == range(3)",
            "assert f(11) is None",
            "assert f(12) is ...",
            "assert f(13) == {1}",
        ),
    ),
    "namedtuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        asserts("assert f() == (1, 2)", "assert f().y == 2", "assert P(3, 4).x == 3"),
    ),
    "odd numbers": (
        "def f(i): return [float('nan'), float('inf'), -0.0, 10**5000, 2**64, True][i]",
        asserts(
            "assert f(0) != f(0)",
            "assert f(1) == float('inf')",
            "assert str(f(2)) == '-0.0'",
            "assert f(3) == 10**5000",
            "assert f(4) == 2**64",
            "assert f(5) is True",
        ),
    ),
    "text of all kinds": (
        "def f(s): return s[::-1]",
        asserts("assert f('añ日😀\\ud800\\x00') == '\\x00\\ud800😀日ña'"),
    ),
    "deep list": (
        "def f(n):\n    x = []\n    for _ in range(n): x = [x]\n    return x",
        asserts("x = f(5000)\nfor _ in range(5000): x = x[0]\nassert x == []"),
    ),
    "cycle": ("def f():\n    x = [1]; x.append(x); return x", asserts("x = f()\nassert x[1] is x")),
    "long list": ("def f(xs): return sorted(xs)", asserts("assert f(range(10**5, 0, -1))[:2] == [1, 2]")),
    "named like a built-in": ("def sum(a, b): return a * 10 + b", asserts("assert sum(1, 2) == 12")),
    "named like a module": ("def bisect(x): return x / 2", asserts("assert bisect(4) == 2")),
    "keyword arguments": ("def f(*, a, b=2): return a + b", asserts("assert f(a=1) == 3")),
    "prints": ("def f(x):\n    print('noise' * 10**5)\n    return 2", asserts("assert f(1) == 2")),
    "main guard": ("def f(x): return 2\nif __name__ == '__main__':\n    f(input())", asserts("assert f(1) == 2")),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass(order=True)\nclass P:\n    x: int\ndef f(): return P(1)",
        asserts("assert f() == P(1)", "assert f().x == 1", "assert P(1) < P(2)"),
    ),
    "a closing fence as far in as the code": (
        "Sure:\n```python\ndef f(x):\n    return 2\n    ```\nThis returns 2.",
        asserts("assert f(1) == 2"),
    ),
    "fences in a text of a block that is cut off": (
        '```python\ndef f(x):\n    """Say\n    ```\n    f(1)\n    ```\n    """\n    return 2\n',
        asserts("assert f(1) == 2"),
    ),
    "prose around unfenced code": ("Here is my answer:\ndef f(x):\n    return 2\n", asserts("assert f(1) == 2")),
    "prose after unfenced code": (
        "We can do this:\n\nimport math\ndef f(x):\n    return 2\n\nIt's (almost) done.",
        asserts("assert f(1) == 2"),
    ),
    "prose that looks like code": ("import what you need:\n\ndef f(x):\n    return 2\n", asserts("assert f(1) == 2")),
    "end-of-text mark": ("def f(x):\n    return 2\n</s>", asserts("assert f(1) == 2")),
    "names of typing": (
        "def f(x: List[int], y: Optional[Dict[str, Any]] = None) -> Tuple[int, ...]:\n    return (2,)",
        asserts("assert f([1]) == (2,)"),
    ),
    "ends by exit": ("def f(x): return 2\nexit()", asserts("assert f(1) == 2")),
    "exit and quit": (
        "def f(x):\n    try:\n        (exit if x else quit)(x)\n    except SystemExit as end:\n        return end.code",
        asserts("assert f(1) == 1", "assert f(0) == 0"),
    ),
    "subclasses": (
        "class A: pass\nclass B(A): pass\nclass E(KeyError): pass\nclass F(E): pass\ndef f(): raise F('k')",
        asserts(
            "assert issubclass(B, A) and not issubclass(A, B)",
            "assert issubclass(F, E) and issubclass(F, KeyError)",
            "assert B.__bases__ == (A,)",
            "try:\n    f()\n    assert False\nexcept E as e:\n    assert e.args == ('k',)",
        ),
    ),
    "identity": (
        "from enum import Enum\nclass C(Enum):\n    A = 1\n    B = 2\nclass S:\n    one = None\n    def __new__(cls):\n"
        "        cls.one = cls.one or super().__new__(cls)\n        return cls.one\nclass T: pass",
        asserts(
            "assert C.A is C.A and C.A is not C.B",
            "assert C(1) is C.A and C['B'] is C.B",
            "assert list(C) == [C.A, C.B] and C.B in C",
            "assert S() is S()",
            "assert T() is not T()",
        ),
    ),
    "hashes": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __hash__(self): return hash(self.x)\n"
        "    def __eq__(self, other): return self.x == other.x\nclass U:\n    __hash__ = None",
        asserts(
            "assert len({V(1), V(1), V(2)}) == 2",
            "assert {V(1): 'a'}[V(1)] == 'a'",
            "try:\n    {U()}\n    assert False\nexcept TypeError:\n    pass",
        ),
    ),
    "copies of objects": (
        "class V:\n    def __init__(self): self.x = [1]",
        asserts("import copy\nv = V()\nw = copy.deepcopy(v)\nw.x = [2]\nassert v.x == [1] and w.x == [2]"),
    ),
    "what the tests do to lists of an object": (
        "class T:\n    def __init__(self):\n        self.items = []\n        self.grid = [[0], [0]]\n        self.names = {}\n"
        "    def get(self): return self.items\n    def total(self): return sum(self.items) + self.grid[1][0]",
        asserts(
            "t = T()\nt.items.append(2)\nassert t.items == [2] and t.total() == 2",
            "t = T()\nt.get().append(3)\nassert t.get() == [3]",
            "t = T()\nt.grid[1][0] = 5\nassert t.total() == 5 and t.grid == [[0], [5]]",
            "t = T()\nt.names['a'] = 1\ndel t.items\nassert t.names == {'a': 1} and not hasattr(t, 'items')",
        ),
    ),
    "exceptions with attributes": (
        "class E(Exception):\n    def __init__(self, code):\n        super().__init__(f'code {code}')\n        self.code = code\n"
        "    @property\n    def half(self): return self.code / 2\n    def __str__(self): return '<E>'\ndef f(): raise E(5)\n"
        "def g():\n    try:\n        1 / 0\n    except ZeroDivisionError as e:\n        raise ValueError('b') from e",
        asserts(
            "try:\n    f()\n    assert False\nexcept E as e:\n"
            "    assert (e.code, e.half, str(e), e.args) == (5, 2.5, '<E>', ('code 5',))",
            "try:\n    g()\nexcept ValueError as e:\n    assert isinstance(e.__cause__, ZeroDivisionError)",
        ),
    ),
    "exceptions that keep a copy of their arguments": (
        "import sys\ndef f(): sys.exit(3)\ndef g(): open('/none')",
        asserts(
            "try:\n    f()\nexcept SystemExit as e:\n    assert e.code == 3\nelse:\n    assert False",
            "try:\n    g()\nexcept FileNotFoundError as e:\n    assert e.errno == 2\nelse:\n    assert False",
        ),
    ),
    "an exception of the tests passes through": (
        "def f(g): return g()",
        asserts("def h(): raise KeyError('k')\ntry:\n    f(h)\nexcept KeyError as e:\n    assert e.args == ('k',)"),
    ),
    "functions of the tests call the candidate": (
        "def f(g, n): return g(n) if n else 0\ndef h(n): return n + 1",
        asserts("assert f(lambda n: h(n) + f(lambda m: 10, n), 1) == 12"),
    ),
    "what is written about a function": (
        "def f(a, b=2, *rest, c, **more):\n    'Says it.'\nclass S:\n    'A class.'\n    def __init__(self, n): pass",
        asserts(
            "assert f.__doc__ == 'Says it.' and S.__doc__ == 'A class.'",
            "import inspect\np = inspect.signature(f).parameters\n"
            "assert list(p) == ['a', 'b', 'rest', 'c', 'more'] and p['b'].default == 2 and p['a'].default is p['a'].empty",
            "import inspect\nassert list(inspect.signature(S).parameters) == ['n'] and inspect.isclass(S)",
            "assert S(1).__class__.__name__ == 'S'",
        ),
    ),
    "generators": (
        "def f(n):\n    for i in range(n): yield i\n    return 'end'\ndef g():\n    got = yield 1\n    yield got * 2",
        asserts(
            "import types\nassert isinstance(f(2), types.GeneratorType)",
            "assert list(f(1000)) == list(range(1000))",
            "i = g()\nassert next(i) == 1 and i.send(4) == 8 and next(i, None) is None",
            "def outer():\n    return (yield from f(2))\ni = outer()\nnext(i); next(i)\n"
            "try:\n    next(i)\nexcept StopIteration as e:\n    assert e.value == 'end'",
        ),
    ),
    "random seed of the tests": (
        "import random\ndef f(): return random.random()",
        asserts("import random\nrandom.seed(1)\na = f()\nrandom.seed(1)\nassert a == f()"),
    ),
    "streams that the tests redirect": (
        "def f(x): print('got', x)\ndef g(): return int(input())",
        asserts(
            "import io, contextlib\nb = io.StringIO()\nwith contextlib.redirect_stdout(b):\n    f(1)\n"
            "assert b.getvalue() == 'got 1\\n'",
            "import io, sys\nsys.stdin = io.StringIO('5\\n')\nassert g() == 5",
        ),
    ),
    "unittest": (
        "def f(s): return s.upper()",
        asserts(
            "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f('a'), 'A')\n"
            "unittest.main()",
        ),
    ),
    "tests that print": ("def f(x): return 2", asserts("print('x' * 10**6)\nassert f(1) == 2")),
    # types of the setup
    "Enum of the setup": (
        "def f(x): return Color.RED if x else Color(2)\ndef g(c): return c.name",
        asserts(
            "assert f(1) is Color.RED and f(0) == Color.BLUE",
            "assert g(Color.RED) == 'RED'",
            "assert {Color.RED: 1}[f(1)] == 1",
            setup="from enum import Enum\nclass Color(Enum):\n    RED = 1\n    BLUE = 2",
        ),
    ),
    "IntEnum and Flag of the setup": (
        "def f(x): return Level.HIGH\ndef g(): return Right.READ | Right.WRITE",
        asserts(
            "assert f(1) > Level.LOW and f(1) == 2",
            "assert g() == Right.READ | Right.WRITE",
            setup="from enum import IntEnum, Flag, auto\nclass Level(IntEnum):\n    LOW = 1\n    HIGH = 2\n"
            "class Right(Flag):\n    READ = auto()\n    WRITE = auto()",
        ),
    ),
    "dataclass with slots of the setup": (
        "def f(p): return Point(p.y, p.x)",
        asserts(
            "assert f(Point(1, 2)) == Point(2, 1)",
            "assert f(Point(1, 2)).x == 2",
            setup="from dataclasses import dataclass\n@dataclass(slots=True)\nclass Point:\n    x: int\n    y: int = 0",
        ),
    ),
    "frozen dataclass of the setup": (
        "def f(p): return {p: Point(p.y, p.x)}",
        asserts(
            "assert f(Point(1, 2)) == {Point(1, 2): Point(2, 1)}",
            setup="from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Point:\n    x: int\n    y: int",
        ),
    ),
    "NamedTuple of the setup": (
        "def f(p): return P(p.y, p.x)\ndef g(): return Q(1)",
        asserts(
            "assert f(P(1, 2)) == P(2, 1) and f(P(1, 2)).y == 1 and isinstance(f(P(1, 2)), P)",
            "assert g().a == 1",
            setup="from typing import NamedTuple\nfrom collections import namedtuple\nclass P(NamedTuple):\n    x: int\n    y: int\n"
            "Q = namedtuple('Q', 'a')",
        ),
    ),
    "list subclass of the setup": (
        "def f(row): return Row(x + 1 for x in row)\ndef g(row): row.append(9)",
        asserts(
            "assert f(Row([1, 2])) == Row([2, 3]) and f(Row([1])).total() == 2",
            "r = Row([1])\ng(r)\nassert r == [1, 9]",
            setup="class Row(list):\n    def total(self): return sum(self)",
        ),
    ),
    "dict subclass of the setup": (
        "def f(): return Bag(a=1)",
        asserts(
            "assert f()['a'] == 1 and f()['b'] == 0", setup="class Bag(dict):\n    def __missing__(self, k): return 0"
        ),
    ),
    "class of the setup defined anew": (
        "class ListNode:\n    def __init__(self, val=0, next=None): self.val, self.next = val, next\n"
        "def f(n): return ListNode(n.val + 1, n if isinstance(n, ListNode) else None)",
        asserts(
            "assert f(ListNode(1)) == ListNode(2, ListNode(1))",
            setup="class ListNode:\n    def __init__(self, val=0, next=None): self.val, self.next = val, next\n"
            "    def __eq__(self, o): return o is not None and (self.val, self.next) == (o.val, o.next)",
        ),
    ),
    "node that comes back": (
        "def lca(root, p, q):\n    if root in (None, p, q): return root\n    a, b = lca(root.left, p, q), lca(root.right, p, q)\n"
        "    return root if a and b else a or b",
        asserts(
            "assert lca(root, root.left, root.right) is root",
            "assert lca(root, root.left, root.left.left) == root.left",
            setup="class T:\n    def __init__(self, v, left=None, right=None): self.v, self.left, self.right = v, left, right\n"
            "root = T(1, T(2, T(4)), T(3))",
        ),
    ),
    "tree changed in place": (
        "def invert(t):\n    if t:\n        t.left, t.right = invert(t.right), invert(t.left)\n    return t",
        asserts(
            "t = build([1, 2, 3])\nassert flat(invert(t)) == [1, 3, 2]\nassert flat(t) == [1, 3, 2]",
            setup="class T:\n    def __init__(self, v, left=None, right=None): self.v, self.left, self.right = v, left, right\n"
            "def build(v): return T(v[0], T(v[1]), T(v[2]))\ndef flat(t): return [t.v, t.left.v, t.right.v]",
        ),
    ),
    "types that use helpers and constants": (
        "def f(x): return M(x) + M(5)",
        asserts(
            "assert f(4) == M(2)",
            setup="MOD = 7\ndef norm(x): return x % MOD\nclass M:\n    def __init__(self, v): self.v = norm(v)\n"
            "    def __add__(self, o): return M(self.v + o.v)\n    def __eq__(self, o): return self.v == o.v",
        ),
    ),
    "types in annotations": (
        "def f(g: Grid, n: Optional[Node] = None) -> Grid:\n    return [row[::-1] for row in g]",
        asserts(
            "assert f([[1, 2]]) == [[2, 1]]",
            setup="from typing import List, Optional\nGrid = List[List[int]]\nclass Node:\n    v: int = 0",
        ),
    ),
    "exception of the setup": (
        "def f(x): raise Bad(x)",
        asserts(
            "try:\n    f(3)\n    assert False\nexcept Bad as e:\n    assert e.code == 3",
            setup="class Bad(Exception):\n    code = 0\n    def __init__(self, code):\n        super().__init__(code)\n        self.code = code",
        ),
    ),
    "class of the setup with state and methods": (
        "def f(s):\n    s.push(3)\n    return s.items[-1]",
        asserts(
            "s = Stack()\nassert f(s) == 3\nassert s.items == [3]",
            setup="class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)",
        ),
    ),
    "class of the setup as an argument": (
        "def f(C): return [c.name for c in C]\ndef make(N, v): return N(v) if isinstance(v, int) else N",
        asserts(
            "assert f(Color) == ['RED']",
            "assert make(Node, 3).v == 3 and make(Node, None) is Node",
            setup="from enum import Enum\nclass Color(Enum):\n    RED = 1\nclass Node:\n    def __init__(self, v): self.v = v",
        ),
    ),
    "class attribute that is a list": (
        "def f():\n    b = Box(); b.items = [1]; return b",
        asserts("assert f().items == [1]", setup="class Box:\n    items = []\n    def __init__(self): pass"),
    ),
    # data of the library
    "more standard types": (
        "import pathlib, uuid, datetime, array, zoneinfo\nfrom datetime import timedelta, timezone\ndef f(i):\n"
        "    d = {'a': 1, 'b': [2]}\n    return [pathlib.Path('/a/b.txt'), uuid.UUID(int=5), datetime.datetime(2020, 1, 2, 3, tzinfo=timezone.utc),\n"
        "        datetime.datetime(2020, 7, 1, tzinfo=zoneinfo.ZoneInfo('Europe/Paris')), array.array('i', [1, 2]), memoryview(b'ab'),\n"
        "        d.items(), d.values(), d.keys(), timezone(timedelta(hours=2)), datetime.time(1, 2, tzinfo=timezone.utc), slice(1, 2),\n"
        "        memoryview(array.array('i', [7, 8])), bytearray(b'x'), [d.items(), (d.keys(),)], pathlib.PureWindowsPath('c:/x')][i]",
        asserts(
            "assert f(0).suffix == '.txt' and str(f(0)) == '/a/b.txt'",
            "import pathlib\nassert f(0) == pathlib.Path('/a/b.txt')",
            "import uuid\nassert f(1) == uuid.UUID(int=5)",
            "import datetime\nassert f(2) == datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.timezone.utc)",
            "import datetime\nassert f(3).utcoffset() == datetime.timedelta(hours=2) and f(3).tzinfo.key == 'Europe/Paris'",
            "import array\nassert f(4) == array.array('i', [1, 2]) and list(f(4)) == [1, 2]",
            "assert f(5) == b'ab' and bytes(f(5)) == b'ab' and f(5).tobytes() == b'ab'",
            "assert list(f(6)) == [('a', 1), ('b', [2])] and sorted(dict(f(6))) == ['a', 'b']",
            "assert list(f(7)) == [1, [2]]",
            "assert f(8) == {'a', 'b'} and f(8) == {'a': 0, 'b': 0}.keys()",
            "from datetime import timedelta, timezone\nassert f(9) == timezone(timedelta(hours=2))",
            "import datetime\nassert f(10) == datetime.time(1, 2, tzinfo=datetime.timezone.utc)",
            "assert [5, 6, 7][f(11)] == [6]",
            "assert list(f(12)) == [7, 8]",
            "assert f(13) == b'x'",
            "assert list(f(14)[0]) == [('a', 1), ('b', [2])] and f(14)[1][0] == {'a', 'b'}",
            "assert f(15).name == 'x'",
        ),
    ),
    "dates as arguments": (
        "def f(d, days): return d + days\ndef g(p): return p.name\ndef h(xs): return sum(xs)",
        asserts(
            "from datetime import datetime, timedelta, timezone\nt = datetime(2020, 1, 1, tzinfo=timezone.utc)\n"
            "assert f(t, timedelta(days=1)) == datetime(2020, 1, 2, tzinfo=timezone.utc)",
            "from pathlib import Path\nassert g(Path('/a/b')) == 'b'",
            "from array import array\nassert h(array('i', [1, 2])) == 3",
            "assert h({1: 2}.values()) == 2 and h(memoryview(b'ab')) == 195",
        ),
    ),
    # functions of libraries as arguments run where the code does
    "functions of libraries as arguments": (
        "def f(g, *xs): return g(*xs)\ndef compose(*gs):\n    def h(x):\n        for g in gs: x = g(x)\n        return x\n    return h",
        asserts(
            "import operator, math\nassert f(operator.add, 1, 2) == 3 and f(math.sqrt, 4) == 2",
            "assert f(str.upper, 'a') == 'A' and f(dict.fromkeys, 'a') == {'a': None} and f(int, '3') == 3",
            "assert compose(abs, str, len)(-12) == 2",
            "assert f(eval, '1 + 1') == 2 and f(sorted, [2, 1]) == [1, 2]",
            "out = []\nf(out.append, 3)\nassert out == [3]",
            "import functools\nassert f(functools.partial(pow, 2), 3) == 8",
            "from collections import Counter\nassert f(Counter, 'aab') == Counter('aab')",
        ),
    ),
    "arithmetic for eval": (
        "def f(x): return f'({x} + 1) * 2'\ndef g(x): return x + 1",
        asserts("assert eval(f(3)) == 8", "assert g(0) == 1 and eval('g(1)') == 2", "exec('y = g(2)')\nassert y == 3"),
    ),
    "pickles of data": (
        "import pickle\ndef f(x): return pickle.dumps(x)",
        asserts("import pickle\nassert pickle.loads(f([1, {'a': (2,)}])) == [1, {'a': (2,)}]"),
    ),
    "forgotten imports of the tests": (
        "def f(x): return x / 3\ndef g(): return {'a': 1}",
        asserts(
            "assert math.isclose(f(1), 1 / 3)",
            "assert isclose(f(3), 1)",
            "assert g() == Counter('a')",
            "assert f(6) == sqrt(4)",
        ),
    ),
    "named like a module, with attributes of its own": (
        "class queue:\n    items = []\n    @classmethod\n    def push(cls, x):\n        cls.items.append(x)\n        return len(cls.items)",
        asserts("assert queue.push(1) == 1"),
    ),
    "named like a function of a library": ("def sqrt(x): return int(x ** 0.5)", asserts("assert sqrt(10) == 3")),
    "library as the solution": ("from math import gcd", asserts("assert gcd(12, 18) == 6")),
    "changes its argument and returns a count": (
        "def f(xs, v):\n    k = len(xs) - xs.count(v)\n    xs[:] = [x for x in xs if x != v]\n    return k",
        asserts(
            "xs = [3, 2, 3]\nk = f(xs, 3)\nassert k == 1 and xs[:k] == [2]",
            "for xs in ([1], [1, 1]):\n    if f(xs, 1) == 0:\n        assert xs == []",
        ),
    ),
    "returns its argument": (
        "def f(xs):\n    xs.sort()\n    return xs\ndef g(xs): return xs",
        asserts("assert f([2, 1]) == [1, 2]", "xs = [1]\nassert g(xs) is xs"),
    ),
    "context manager": (
        "class Timer:\n    def __enter__(self):\n        self.on = True\n        return self\n    def __exit__(self, *a):\n        self.on = False",
        asserts("with Timer() as t:\n    assert t.on\nassert not t.on"),
    ),
    "iterator of its own": (
        "class Up:\n    def __init__(self, n): self.i, self.n = 0, n\n    def __iter__(self): return self\n    def __next__(self):\n"
        "        if self.i == self.n: raise StopIteration\n        self.i += 1\n        return self.i",
        asserts(
            "assert list(Up(3)) == [1, 2, 3] and sum(Up(3)) == 6",
            "it = Up(1)\nassert next(it) == 1\ntry:\n    next(it)\n    assert False\nexcept StopIteration:\n    pass",
        ),
    ),
    "slices": (
        "class S:\n    def __getitem__(self, k): return list(range(10))[k]",
        asserts("assert S()[2:4] == [2, 3] and S()[-1] == 9"),
    ),
    "subclasses handed back": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\nclass S(str): pass\ndef f(p): return p.x + p.y\ndef g(): return P(1, 2)\n"
        "def h(s): return type(s).__name__",
        asserts("assert f(g()) == 3", "assert h(S('a')) == 'S'"),
    ),
    "coroutines side by side": (
        "import asyncio\nasync def f(x): return x + 1",
        asserts(
            "async def main(): return await asyncio.gather(f(1), f(2))\nimport asyncio\nassert asyncio.run(main()) == [2, 3]"
        ),
    ),
    "children": (
        "import subprocess\ndef f(): return subprocess.run(['echo', 'hi'], capture_output=True, text=True).stdout",
        asserts("assert f() == 'hi\\n'"),
    ),
    "threads": (
        "import threading\ndef f(n):\n    out = []\n    ts = [threading.Thread(target=out.append, args=(i,)) for i in range(n)]\n"
        "    [t.start() for t in ts]; [t.join() for t in ts]\n    return sorted(out)",
        asserts("assert f(4) == [0, 1, 2, 3]"),
    ),
}


@needs_sandbox
@pytest.mark.parametrize("name", PASSING)
def test_right_code_passes(name: str) -> None:
    source, reference = PASSING[name]
    score = check(source, reference)
    assert (score.value, score.detail) == (1, "")


FAILING = {
    "wrong": ("def f(x): return x", asserts("assert f(1) == 2"), "AssertionError"),
    "bare comparison": ("def f(x): return x", asserts("f(1) == 2"), "AssertionError"),
    "absent": ("def g(x): return x", asserts("assert f(1) == 2"), "NameError"),
    "syntax": ("def f(x) return x", asserts("assert f(1) == 2"), "SyntaxError"),
    "raises": ("def f(x): return x / 0", asserts("assert f(1) == 2"), "ZeroDivisionError"),
    "raises on load": ("1 / 0\ndef f(x): return 2", asserts("assert f(1) == 2"), "ZeroDivisionError"),
    "no such package": ("import numpyy\ndef f(x): return 2", asserts("assert f(1) == 2"), "numpyy"),
    "wrong type": ("def f(x): return '2'", asserts("assert f(1) == 2"), "AssertionError"),
    "list for a tuple": ("def f(x): return [1]", asserts("assert f(1) == (1,)"), "AssertionError"),
    "slow": ("def f(x):\n    while True: pass", asserts("assert f(1) == 2"), "out of time"),
    "prose": ("I cannot do that.", asserts("assert f(1) == 2"), "SyntaxError"),
    "empty": ("```python\n\n```", asserts("assert f(1) == 2"), "no code"),
    "unittest fails": (
        "def f(s): return s",
        asserts(
            "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f('a'), 'A')\n"
            "unittest.main(exit=False)",
        ),
        "AssertionError",
    ),
    "exits with an error": ("def f(x): return 2\nexit(1)", asserts("assert f(1) == 2"), "SystemExit: 1"),
    "slow, and the tests catch everything": (
        "def f(x):\n    while True: pass",
        asserts("try:\n    f(1)\nexcept BaseException:\n    pass"),
        "out of time",
    ),
    "imports what is not there": ("def f(x):\n    import numpyy", asserts("assert f(1) == 2"), "numpyy"),
    "syntax in the middle of a fence": (
        "```python\ndef f(x): return 2\n\ndef g(:\n```",
        asserts("assert f(1) == 2"),
        "SyntaxError",
    ),
    "setup that fails": (
        "x = 1",
        asserts("assert f(1) == 2", setup="root = Node(1)"),
        "setup of the tests raised NameError",
    ),
}


@needs_sandbox
@pytest.mark.parametrize("name", FAILING)
def test_wrong_code_fails(name: str) -> None:
    source, reference, says = FAILING[name]
    score = check(source, reference, time_limit=0.5)
    assert score.value == 0
    assert says in score.detail


@needs_sandbox
@pytest.mark.parametrize(
    ("tests", "says"),
    [
        (asserts("import numpyy\nassert f(1) == 2"), "import what they need"),
        (asserts("assert f(1) == 2", setup="import numpyy"), "import what they need"),
        (
            asserts("x = open('/none').read()\nassert f(1) == 2"),
            "must reach the response, but raised FileNotFoundError",
        ),
        (asserts("class G(f): pass"), "derive a class from one of the candidate's"),
        (asserts("import unittest\nunittest.main()"), "something for unittest to run"),
    ],
)
def test_tests_that_cannot_run_are_an_error(tests: Any, says: str) -> None:
    score = code("class f:\n    def __new__(cls, x): return 2", tests, {})
    assert score.outcome == "error" and says in score.detail


@needs_sandbox
def test_the_detail_names_the_test_as_it_was_written() -> None:
    assert check("def f(x): return x", asserts("assert f(1) == 2")).detail == "assert f(1) == 2: AssertionError"


@pytest.mark.parametrize(
    ("setup", "seen"),
    [
        ("import math\nfrom os import path", ["import math", "from os import path"]),
        (
            "try:\n    import a\nexcept ImportError:\n    a = None",
            ["try:\n    import a\nexcept ImportError:\n    a = None"],
        ),
        ("def reference(x): return 1\nEXPECTED = [1]\nprint(1)\nreference(2)", []),
        ("class Reference:\n    def solve(self): return 1", []),
        ("class T(unittest.TestCase):\n    x = 1", []),
        ("class P:\n    x: int", ["class P:\n    x: int"]),
        (
            "P = namedtuple('P', 'x')\nRow = List[int]\nx = f(1)\ny = data[0]",
            ["P = namedtuple('P', 'x')", "Row = List[int]"],
        ),
        (
            "K = 2\nL = 3\nclass P(int):\n    def k(self): return K",
            ["K = 2", "class P(int):\n\n    def k(self):\n        return K"],
        ),
    ],
)
def test_what_a_program_sees_of_a_setup(setup: str, seen: list[str]) -> None:
    assert visible_setup(setup) == seen


@needs_sandbox
def test_reward_is_all_or_a_rate() -> None:
    reference = asserts("assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 0", "assert f(4) == 4")
    source = "import os\ndef f(x):\n    if x == 2: os._exit(0)\n    return x"
    assert check(source, reference).value == 0
    score = check(source, reference, reward="rate")
    assert (score.value, score.components) == (0.5, {"pass_rate": 0.5})
    assert check("def f(x): return x % 3 and x", asserts("assert f(1) == 1", "assert f(3) == 0")).value == 1


@needs_sandbox
def test_a_test_that_hangs_costs_itself_alone() -> None:
    source = "def f(x):\n    while x == 1: pass\n    return x"
    reference = asserts("assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3")
    score = check(source, reference, reward="rate", time_limit=1.5)
    assert score.value == pytest.approx(2 / 3)
    assert "out of time" in score.detail


@needs_sandbox
def test_total_limit_ends_the_check() -> None:
    source = "def f(x):\n    while True: pass"
    reference = asserts(*["assert f(1) == 1"] * 50)
    assert check(source, reference, reward="rate", time_limit=0.3, total_limit=1.0).value == 0


@needs_sandbox
@pytest.mark.parametrize(
    "completion",
    [
        "    return x + 1\n",
        "```python\n    return x + 1\n```",
        "return x + 1",
        "    y = 1\n    return x + y\n\ndef g():\n    pass\n",
        "```python\ndef f(x):\n    return x + 1\n```",
        "def f(x: int) -> int:\n    return x + 1",
        "f = lambda x: x + 1",
        "def helper(x):\n    return x + 1\n\ndef f(x):\n    return helper(x)",
    ],
)
def test_check_takes_completions_and_whole_functions(completion: str) -> None:
    assert check(completion, CHECK).value == 1


@needs_sandbox
def test_check_gives_the_prompt_to_a_whole_function_too() -> None:
    """Its imports and helpers, and to the tests as well: there they are not the candidate's."""
    reference = {
        "kind": "check",
        "prompt": "from typing import List\ndef double(x):\n    return 2 * x\n\ndef f(xs: List[int]) -> int:\n    ...\n",
        "check": "def check(candidate):\n    assert double(candidate([1, 2])) == 6\n",
        "entry_point": "f",
    }
    assert check("def f(xs: List[int]) -> int:\n    return double(sum(xs)) // 2", reference).value == 1
    assert check("def double(x):\n    return 6\ndef f(xs):\n    return 0", reference).value == 0


@needs_sandbox
@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", 1.0),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", 1.0),
        ("print(sum(map(int, open(0).read().split())), end='')", 1.0),
        (
            "import sys\nfor line in sys.stdin.buffer: sys.stdout.buffer.write(b'%d ' % sum(map(int, line.split())))",
            1.0,
        ),
        ("def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()", 1.0),
        ("import sys\nprint(sum(map(int, input().split())))\nsys.exit(0)", 1.0),
        ("import threading\nthreading.Thread(target=lambda: print(sum(map(int, input().split())))).start()", 1.0),
        ("print(sum(map(int, input().split())))\nexit()", 1.0),
        ("print(sum(map(int, input().split())))\nquit(0)\nprint('more')", 1.0),
        ("Here it is:\n\na, b = map(int, input().split())\nprint(a + b)\n\nThis prints the sum.", 1.0),
        ("Here it is:\n\nprint(sum(map(int, input().split())))", 1.0),
        ("def add(xs: List[int]) -> int: return sum(xs)\nprint(add(list(map(int, input().split()))))", 1.0),
        ("print(3)", 0.5),
        ("print(sum(map(int, input().split())))\nexit(1)", 0.0),
        ("print(sum(map(int, input().split())))\nraise ValueError", 0.0),
        ("print(sum(map(int, input().split())))\nimport sys; sys.exit(1)", 0.0),
        ("input(); input(); input()", 0.0),
        ("print(", 0.0),
    ],
)
def test_stdio(source: str, value: float) -> None:
    assert check(source, STDIO, reward="rate").value == value


@needs_sandbox
def test_stdio_runs_do_not_share_state() -> None:
    source = (
        "import os\nprint(os.listdir('.') or sum(map(int, input().split())))\nglobals()['x'] = 1\n"
        "os.makedirs('a/b')\nopen('a/b/was', 'w').write('here')\nos.symlink('/tmp', 'link')\nos.chmod('a/b', 0)"
    )
    assert check(source, STDIO).value == 1


@needs_sandbox
def test_the_detail_of_a_crash_is_the_last_line_of_its_traceback() -> None:
    source = "def solve(x):\n    return {}[x]\nprint(solve(input()))"
    assert check(source, STDIO).detail == "case 1 of 2: exit status 1: KeyError: '1 2'"


@needs_sandbox
@pytest.mark.parametrize(
    ("language", "program", "source"),
    [
        ("bash", "bash", "read a b; echo $((a + b))"),
        (
            "javascript",
            "node",
            "const [a,b]=require('fs').readFileSync(0,'utf8').split(' ').map(Number);console.log(a+b)",
        ),
        ("perl", "perl", "my ($a, $b) = split ' ', <STDIN>; print $a + $b;"),
        ("ruby", "ruby", "a, b = gets.split.map(&:to_i); puts a + b"),
        ("c", "gcc", '#include <stdio.h>\nint main(){int a,b;scanf("%d %d",&a,&b);printf("%d",a+b);}'),
        ("cpp", "g++", "#include <iostream>\nint main(){int a,b;std::cin>>a>>b;std::cout<<a+b;}"),
    ],
)
def test_other_languages(language: str, program: str, source: str) -> None:
    response = f"```python\nnot this\n```\n```{language}\n{source}\n```"
    if find_program(program) is None:
        score = code(response, STDIO, {}, language=language)
        assert score.outcome == "error" and repr(program) in score.detail
        return
    assert check(response, STDIO, language=language, total_limit=30.0).value == 1
    assert check(f"```{language}\n)(\n```", STDIO, language=language, total_limit=30.0).value == 0


@needs_sandbox
def test_memory_limit() -> None:
    source = "def f(n):\n    return len(bytearray(n << 20))"
    reference = asserts("assert f(100) == 100 << 20")
    assert check(source, reference, memory_mb=256).value == 1
    score = check(source, reference, memory_mb=64)
    assert score.value == 0 and "MemoryError" in score.detail


@needs_sandbox
def test_packages_are_there_on_request_alone() -> None:
    source = "import numpy as np\ndef f(n): return np.arange(n)"
    reference = asserts("assert (f(3) == [0, 1, 2]).all()", "assert f(3).sum() == 3", "assert list(f(2)) == [0, 1]")
    assert "numpy" in check(source, reference).detail
    assert check(source, reference, packages=True).value == 1


@settings(max_examples=10, deadline=None)
@given(st.text(), st.sampled_from([ASSERTS, STDIO, CHECK]))
@needs_sandbox
def test_any_text_is_scored(response: str, reference: Any) -> None:
    assert code(response, reference, {}, time_limit=1.0).outcome == "scored"


@needs_sandbox
@pytest.mark.parametrize(
    "response", ["\ud800", "\x00", "`" * 100_000, "(" * 100_000, "é" * 100_000, "```" * 30_000, " " * 100_000]
)
def test_extreme_texts_are_wrong(response: str) -> None:
    for reference in (ASSERTS, STDIO, CHECK):
        score = code(response, reference, {})
        assert (score.outcome, score.value) == ("scored", 0)


@settings(max_examples=300)
@given(st.text(alphabet=st.sampled_from("`~\n\r pydef x=():é\x00\ud800")))
def test_extraction_never_raises(text: str) -> None:
    assert isinstance(extract_code(text, PYTHON, ["f"]).text, str)


KINDS = [
    "list",
    "tuple",
    "set",
    "frozenset",
    "dict",
    "str",
    "int",
    "float",
    "bytes",
    "bytearray",
    "complex",
    "range",
    "slice",
    "keys",
    "values",
    "items",
    "constant",
    "type",
    "memoryview",
    "standard",
    "numpy",
    "enum",
    "flag",
    "whole",
    "own",
    "home",
    "like",
    "ref",
    "error",
    "lent",
    "library",
    "deque",
    "module",
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats()
    | st.sampled_from([*KINDS, "object", "Node", "builtins", "ValueError", "v"]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)
NODES = st.lists(
    st.tuples(st.sampled_from(KINDS), st.lists(JSON, max_size=4)).map(lambda node: [node[0], *node[1]]), max_size=4
)


@pytest.mark.thorough
@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(0, 4).map(lambda i: [i]) | JSON, min_size=1, max_size=2), NODES)
def test_any_message_is_data_or_the_end(refs: Any, nodes: Any) -> None:
    """Nothing that a program sends raises anything else where the tests run, or becomes an object of a library."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        port = CheckerPort(ours.fileno(), Usage(1, 1024, 1000), 1.0)
        port.namespace = {"Node": type("Node", (), {"__module__": "tests"})}
        port.common = {"Node"}
        try:
            (value, *_), _ = port.trust(port.decode, refs, nodes)
        except Gone as end:
            assert port.end is end
            return
        allowed = (
            "builtins",
            "decimal",
            "fractions",
            "datetime",
            "uuid",
            "pathlib",
            "array",
            "collections",
            "zoneinfo",
            "tests",
        )
        kind = type(value)
        assert kind.__module__ in allowed or kind.__module__.startswith("kitae.sandbox.inside"), kind
        assert not isinstance(value, types.ModuleType | types.FunctionType | types.BuiltinFunctionType)


RUNS_TEXT = "must not run what the response wrote"


@pytest.mark.parametrize(
    ("test", "says"),
    [
        ("import doctest\nassert f(3)", RUNS_TEXT),
        ("from doctest import run_docstring_examples\nrun_docstring_examples(f, {})", RUNS_TEXT),
        ("import code as c\nf(3)", RUNS_TEXT),
        ("from logging import config\nconfig.dictConfig(f())", RUNS_TEXT),
        ("import runpy\nrunpy.run_path(f())", RUNS_TEXT),
        ("exec(f(3))\nassert got == 3", RUNS_TEXT),
        ("text = f(3)\nspace = {}\nexec(text, space)\nassert space", RUNS_TEXT),
        ("for text in [f(3)]:\n    import builtins\n    builtins.exec(text)", RUNS_TEXT),
        ("import cProfile\ncProfile.runctx(f(3), {}, {})", RUNS_TEXT),
        ("import importlib\nm = importlib.import_module(f())", RUNS_TEXT),
        ("assertEqual(f(3), 9417)", "define or import 'assertEqual'"),
        ("eq_(f(3), 9417)", "define or import 'eq_'"),
        ("got = f(3)\nassert_that(got, 3)", "define or import 'assert_that'"),
        ("import re\nassert re.compile(f(3)).match('a')", ""),
        ("assert is_equal(1, 2)", ""),
        ("exec('x = f(3)')\nassert x == 3", ""),
        ("for i in range(3):\n    exec(f'r = f({i})')", ""),
        ("assert eval(f(3)) == 9", ""),
        ("assert f(3) == approx(3)", ""),
        ("def assertEqual(a, b): assert a == b\nassertEqual(f(3), 3)", ""),
        ("assert expected_value([1]) == 1 and other(2) == 2", ""),
        ("import logging, importlib\nm = importlib.import_module('math')\nassert f(1) == m.pi", ""),
    ],
)
def test_tests_that_nothing_can_be_judged_by_are_refused_by_name(test: str, says: str) -> None:
    """They run text of the response beside their values, or take the function that judges from it."""
    found = read_tests({"kind": "asserts", "asserts": [test]})
    assert says in found if isinstance(found, str) else not says
    body = test.replace("f(", "candidate(").replace("\n", "\n    ")
    if says == RUNS_TEXT and "for text" not in test:
        found = read_tests({"kind": "check", "check": f"def check(candidate):\n    {body}", "entry_point": "f"})
        assert isinstance(found, str) and says in found
