"""Programs that try to get out of the sandbox, to harm the machine, or to pass without solving anything.

Each attack is written so that it scores 1 where it succeeds, and is bounded by short limits, so that a hole costs a
failed test and not the machine. What an attack must not touch is checked from outside as well.
"""

# ruff: noqa: E501 - programs of one line each
import asyncio
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kitae.sandbox.backends import packages_path
from kitae.types import Score
from kitae.verifiers.code import code_verifier as code_module
from kitae.verifiers.code.code_verifier import code
from kitae.verifiers.pool import VerifierPool

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

LIMITS: dict[str, Any] = {"time_limit": 0.5, "total_limit": 6.0, "memory_mb": 128}
AMPLE = {"time_limit": 30.0, "total_limit": 55.0}  # for what must succeed, on a loaded machine too
ASSERTS = {"tests": {"kind": "asserts", "asserts": ["assert f(3) == 9417", "assert f(5) == 15695"], "setup": ""}}
CHECK = {
    "tests": {
        "kind": "check",
        "prompt": 'def f(x):\n    """Multiply."""\n',
        "check": "def check(candidate):\n    assert candidate(3) == 9417\n    assert candidate(5) == 15695\n",
        "entry_point": "f",
    }
}
STDIO = {"tests": {"kind": "stdio", "cases": [{"stdin": "3", "stdout": "9417\n"}, {"stdin": "5", "stdout": "15695"}]}}
ONE_STDIO = {"tests": {"kind": "stdio", "cases": [{"stdin": "3", "stdout": "9417\n"}]}}
TRUE = {"tests": {"kind": "asserts", "asserts": ["assert f() is True"]}}
SOLUTION = "def f(x):\n    return x * 3139\n"


def attack(source: str, reference: Any = TRUE, **options: Any) -> Score:
    start = time.monotonic()
    score = code(f"```python\n{source}\n```", reference, {}, **(LIMITS | options))
    assert time.monotonic() - start < 60
    assert score.outcome == "scored", score.detail
    return score


@pytest.fixture(autouse=True)
def _healthy_afterwards() -> Iterator[None]:
    """Whatever an attack did, the next honest solution passes."""
    yield
    assert attack(SOLUTION, ASSERTS, **AMPLE).value == 1


FORGERIES = {
    "prints success": "print('all tests passed'); print('9417'); print('OK')",
    "os._exit(0)": "import os\nos._exit(0)",
    "os._exit(0) in the function": "import os\ndef f(x):\n    os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "SystemExit in the function": "def f(x):\n    raise SystemExit(0)",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x):\n    raise SystemExit",
    "always equal": (
        "class Any:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    def __hash__(self): return 0\n    def __bool__(self): return True\ndef f(x):\n    return Any()"
    ),
    "always equal int": (
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def f(x):\n    return Any(1)"
    ),
    "always equal metaclass": (
        "class Meta(type):\n    def __eq__(cls, other): return True\n    __hash__ = type.__hash__\n"
        "class Any(metaclass=Meta): pass\ndef f(x):\n    return Any"
    ),
    "always equal, and hashes alike": (
        "class Any:\n    def __init__(self, x): self.x = x\n    def __eq__(self, other): return True\n"
        "    def __hash__(self): return hash(self.x)\ndef f(x):\n    return Any(9417)"
    ),
    "ImportError in the function": "def f(x):\n    raise ImportError",
    "a module that no machine has": (
        "import gc\ndef f(x):\n    port = next(o for o in gc.get_objects() if type(o).__name__ == 'CandidatePort')\n"
        "    type(port).offer = lambda *_: ['ref', 1, 'module', 'winreg', '']\n    return object()"
    ),
    "mock.ANY": "from unittest.mock import ANY\ndef f(x):\n    return ANY",
    "mock as the function": "from unittest.mock import MagicMock as f",
    "patches built-ins": (
        "import builtins\nbuiltins.AssertionError = type('E', (Exception,), {})\nbuiltins.exec = lambda *a: None\n"
        "builtins.compile = lambda *a, **k: None\nbuiltins.all = lambda *a: True\ndef f(x):\n    return 0"
    ),
    "patches the checker": (
        "import sys, gc\nfor name, module in list(sys.modules.items()):\n    if 'checker' in name or 'warden' in name:\n"
        "        for key in list(vars(module)):\n            if not key.startswith('__'):\n"
        "                setattr(module, key, lambda *a, **k: True)\ndef f(x):\n    return 0"
    ),
    "searches memory for the tests": (
        "import gc\ndef f(x):\n    for found in gc.get_objects():\n        if isinstance(found, dict):\n"
        "            for value in list(found.values()):\n"
        "                if isinstance(value, (list, tuple)) and any('== ' + '9417' in str(v) for v in value):\n"
        "                    return 9417\n    return 0"
    ),
    "walks up the frames": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        for scope in (frame.f_locals, frame.f_globals):\n"
        "            text = repr(scope)\n            if '94' + '17' in text and 'candidate(3)' in text: return 9417\n"
        "        frame = frame.f_back\n    return 0"
    ),
    "writes to every descriptor": (
        "import os\nframe = b'passed'\nmessage = (6).to_bytes(8, 'little') + frame + bytes(16)\n"
        "for fd in range(64):\n    try: os.write(fd, message * 4)\n    except OSError: pass\ndef f(x):\n    return 0"
    ),
    "answers in place of the runner": (
        "import os\nmessage = b'[\"ok\",[true],[]]'\nfor _ in range(9):\n"
        "    try: os.write(3, len(message).to_bytes(8, 'little') + message)\n    except OSError: pass\n"
        "def f(x):\n    return 0"
    ),
    "opens the reports of process 1": (
        "import os\nfor fd in range(9):\n    try:\n        with open(f'/proc/1/fd/{fd}', 'wb', buffering=0) as pipe:\n"
        "            pipe.write((6).to_bytes(8, 'little') + b'passed' + bytes(16))\n    except OSError: pass\n"
        "def f(x):\n    return 0"
    ),
    "reads the orders of process 1": (
        "import os, re\ndef f(x):\n    for path in ('/proc/1/fd/0', '/proc/1/mem', '/proc/1/environ', '/proc/1/cmdline'):\n"
        "        try:\n            text = open(path, 'rb').read(100000)\n        except OSError:\n            continue\n"
        "        found = re.search(rb'== (\\d+)', text)\n        if found: return int(found[1])\n    return 0"
    ),
    "recursion": "def f(x):\n    return f(x)",
    "deep nesting": "f = " + "(" * 5000 + ")" * 5000,
    "deep unary": "f = " + "-" * 200_000 + "1",
    "null byte": "def f(x):\n    return 9417\x00",
    "kills itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "raises an own exception": "class E(BaseException):\n    def __str__(self): raise self\ndef f(x):\n    raise E",
    "replaces __builtins__": "__builtins__ = {}\ndef f(x):\n    return 9417 if x == 4 else None",
    "endless generator": "def f(x):\n    while True:\n        yield 9417",
    "sets a trace": "import sys\nsys.settrace(lambda *a: None)\nsys.setrecursionlimit(50)\ndef f(x):\n    return 0",
}


@pytest.mark.sentinel(keep=3)
@pytest.mark.parametrize("name", FORGERIES)
@pytest.mark.parametrize("reference", [ASSERTS, CHECK, STDIO], ids=["asserts", "check", "stdio"])
def test_nothing_passes_without_the_answer(name: str, reference: Any) -> None:
    assert attack(FORGERIES[name], reference).value == 0


@pytest.mark.parametrize(
    "raised",
    [
        "SystemExit(0)",
        "KeyboardInterrupt",
        "unittest.SkipTest",
        "type('SkipTest', (Exception,), {'__module__': 'unittest'})",
        "type('_ShouldStop', (Exception,), {'__module__': 'unittest.case'})",
    ],
)
def test_no_exception_ends_a_unittest_well(raised: str) -> None:
    test = (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(3), 9417)\n"
        "unittest.main()"
    )
    reference = {"kind": "asserts", "asserts": [test]}
    assert attack(f"import unittest\ndef f(x):\n    raise {raised}", reference).value == 0
    assert attack(SOLUTION, reference, **AMPLE).value == 1


def asserts_of(*asserts: str, setup: str = "") -> dict[str, Any]:
    return {"kind": "asserts", "asserts": list(asserts), "setup": setup}


IS = "assert f(3) == 9417"
NODE = "class Node:\n    def __init__(self, v): self.v = v\n    def same(self, other): return self.v == other.v\n    def __eq__(self, other): return self.same(other)"
PICKLED = (
    "class P:\n    def __reduce__(self): return eval, (\"__import__('sys').modules['tests'].expected\",)\n"
    "import pickle\ndef f(x): return pickle.dumps(P())"
)
# name: (program, tests). Each would score 1 if the tests believed the program, or used what it brings along.
CONFIDENCE_TRICKS: dict[str, tuple[str, dict[str, Any]]] = {
    # names of the library
    "function that claims to be unittest's": (
        "def main(*a): return 0\nmain.__module__ = 'unittest'",
        asserts_of("assert main(3) == 9417"),
    ),
    "function of a library that exits": ("from ftplib import test", asserts_of("assert test(3) == 9417")),
    "os._exit under another name": ("from os import _exit as f", asserts_of(IS)),
    "module that becomes the real one": ("import sys\ndef Door(): return sys", asserts_of("v = Door()\nv.exit()")),
    "module as an attribute": (
        "import sys\nclass Door:\n    lock = sys",
        asserts_of("Door().lock.exit()\nassert False"),
    ),
    "class math": (
        "class math:\n    isclose = staticmethod(lambda *a: True)\ndef f(x): return 0",
        asserts_of("assert math.isclose(f(3), 9417)"),
    ),
    "own isclose": ("def isclose(*a, **k): return True\ndef f(x): return 0", asserts_of("assert isclose(f(3), 9417)")),
    "patched isclose": (
        "import math\nfrom math import isclose\nmath.isclose = isclose = lambda *a, **k: True\ndef f(x): return 0",
        asserts_of("assert isclose(f(3), 9417)"),
    ),
    "own Counter": ("def Counter(x): return 0\ndef f(x): return 0", asserts_of("assert f(3) == Counter([9417])")),
    "own deepcopy": (
        "def deepcopy(x): return 0\ndef f(x): return 0",
        asserts_of("want = 9417\nassert f(3) == deepcopy(want)"),
    ),
    # what the setup holds
    "reference solution": ("def f(x): return reference(x)", asserts_of(IS, setup="def reference(x): return x * 3139")),
    "reference class": (
        "def f(x): return Reference().solve(x)",
        asserts_of(IS, setup="class Reference:\n    def solve(self, x): return x * 3139"),
    ),
    "expected values": ("def f(x): return EXPECTED[x]", asserts_of(IS, setup="EXPECTED = {3: 9417}")),
    "test case in the setup": (
        "def f(x): return T.want",
        asserts_of(IS, setup="import unittest\nclass T(unittest.TestCase):\n    want = 9417"),
    ),
    "source of the setup by gc": (
        "import gc, re\ndef f(x):\n    for o in gc.get_objects():\n        if type(o) in (dict, list, tuple):\n"
        "            for v in list(o.values() if type(o) is dict else o):\n"
        "                found = re.search(r'def refer' r'ence\\(x\\):\\s*return (\\d+)', v) if type(v) is str else None\n"
        "                if found: return int(found[1])\n    return 0",
        asserts_of(IS, setup="def reference(x): return 9417"),
    ),
    "constants of the setup by frames": (
        "import sys\ndef f(x):\n    g = sys._getframe(1)\n    while g:\n        for v in list(g.f_globals.values()) + list(g.f_locals.values()):\n            if isinstance(v, dict) and 3 in v: return v[3]\n        g = g.f_back\n    return 0",
        asserts_of(IS, setup="EXPECTED = {3: 9417}"),
    ),
    # instances of the setup's classes
    "method replaced in the instance": (
        "def f(x):\n    n = Node(0); n.same = lambda other: True; return n",
        asserts_of("assert f(3) == Node(9417)", setup=NODE),
    ),
    "method replaced, on the right": (
        "def f(x):\n    n = Node(0); n.same = lambda other: True; return n",
        asserts_of("assert Node(9417) == f(3)", setup=NODE),
    ),
    "method replaced in the class": (
        "Node.same = lambda *a: True\nNode.__eq__ = Node.same\ndef f(x): return Node(0)",
        asserts_of("assert f(3) == Node(9417)", setup=NODE),
    ),
    "class replaced": (
        "class Node:\n    def __init__(self, v): self.v = v\n    def __eq__(self, o): return True\ndef f(x): return Node(0)",
        asserts_of("assert f(3) == Node(9417)", setup=NODE),
    ),
    "subclass of the setup's class": (
        "class Sub(Node):\n    def same(self, o): return True\ndef f(x): return Sub(0)",
        asserts_of("assert f(3) == Node(9417)", setup=NODE),
    ),
    "obliging attribute": (
        "class Yes:\n    def __eq__(self, o): return True\n    def same(self, o): return True\ndef f(x): return Node(Yes())",
        asserts_of("assert f(3) == Node(9417)", setup=NODE.replace("self.v == other.v", "self.v.same(other.v)")),
    ),
    "obliging text in an attribute": (
        "class Yes(str):\n    def same(self, o): return True\ndef f(x): return Node(Yes())",
        asserts_of("assert f(3) == Node(9417)", setup=NODE.replace("self.v == other.v", "self.v.same(other.v)")),
    ),
    "property overlaid": (
        "def f(x):\n    n = Node(0); n.__dict__['ok'] = True; return n",
        asserts_of(
            "assert f(3).ok",
            setup="class Node:\n    def __init__(self, v): self.v = v\n    @property\n    def ok(self): return self.v == 9417",
        ),
    ),
    "class swapped in the instance": (
        "def f(x):\n    n = Node(0); n.__dict__['__class__'] = n.__dict__['__eq__'] = lambda *a: True; return n",
        asserts_of("assert f(3) == Node(9417)", setup=NODE),
    ),
    "slots with more than data": (
        "class Yes:\n    def __eq__(self, o): return True\n    __hash__ = object.__hash__\ndef f(x): return P(Yes())",
        asserts_of(
            "assert f(3) == P(9417)",
            setup="from dataclasses import dataclass\n@dataclass(slots=True)\nclass P:\n    v: int",
        ),
    ),
    "list of the setup's, lying about itself": (
        "class Liar(Row):\n    def __eq__(self, o): return True\n    def __iter__(self): return iter([9417])\ndef f(x): return Liar()",
        asserts_of("assert f(3) == Row([9417])", setup="class Row(list):\n    pass"),
    ),
    "member of an Enum by another name": (
        "def f(x):\n    C.B._name_ = 'A'; C.B._value_ = 1; return C.B",
        asserts_of("assert f(3) is C.A", setup="from enum import Enum\nclass C(Enum):\n    A = 1\n    B = 2"),
    ),
    # the flow of the tests
    "__exit__ that swallows": (
        "class f:\n    def __init__(self, x): pass\n    def __enter__(self): return 0\n    def __exit__(self, *a): return True",
        asserts_of("with f(3) as got:\n    assert got == 9417"),
    ),
    "__exit__ of a contextmanager": (
        "from contextlib import contextmanager\n@contextmanager\ndef f(x):\n    try: yield 0\n    except BaseException: pass",
        asserts_of("with f(3) as got:\n    assert got == 9417"),
    ),
    "StopIteration ends a map": (
        "def f(x): raise StopIteration",
        asserts_of("assert all(map(lambda x: f(x) == 9417, [3]))"),
    ),
    "own StopIteration ends a map": (
        "class E(StopIteration): pass\ndef f(x): raise E",
        asserts_of("assert all(map(lambda x: f(x) == 9417, [3]))"),
    ),
    "assertion caught in the program": (
        "def f(check):\n    try: check(0)\n    except AssertionError: pass",
        asserts_of("def check(x): assert x == 9417\nf(check)"),
    ),
    "exec as a callback": (
        "def f(g, x):\n    g(\"import sys; sys.modules['tests'].__dict__['want'] = 0\")\n    return 0",
        asserts_of("assert f(exec, 3) == want", setup="want = 9417"),
    ),
    "eval as a callback": (
        "def f(g, x): return g(\"__import__('sys').modules['tests'].want\")",
        asserts_of("assert f(eval, 3) == want", setup="want = 9417"),
    ),
    "getattr as a callback": (
        "def f(g, x): return g(g(g(h, '__globals__'), 'get')('want'), 'real')\nh = len",
        asserts_of("assert f(getattr, 3) == want", setup="want = 9417"),
    ),
    "text for eval": ("def f(x): return 'want'", asserts_of("assert eval(f(3)) == want", setup="want = 9417")),
    "pickle": (PICKLED, asserts_of("import pickle\nassert pickle.loads(f(3)) == expected", setup="expected = 9417")),
    "argument emptied": (
        "def f(xs):\n    xs.clear()\n    return []",
        asserts_of("xs = [3, 1]\nassert f(xs) == sorted(xs)"),
    ),
    "argument emptied, in a call": (
        "def f(xs):\n    xs.clear()\n    return xs",
        asserts_of(
            "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        xs = [3, 1]\n        self.assertEqual(f(xs), sorted(xs))\nunittest.main()"
        ),
    ),
    "argument changed in a dict": (
        "def f(case):\n    case['x'] = 0\n    return 0",
        asserts_of("case = {'x': 3}\nassert f(case) == case['x'] * 3139"),
    ),
    "instance changed": (
        "def f(n):\n    n.v = 0\n    return 0",
        asserts_of("n = Node(3)\nassert f(n) == n.v * 3139", setup=NODE),
    ),
    "type of the argument changed": (
        "import gc\ndef f(xs):\n    port = next(o for o in gc.get_objects() if type(o).__name__ == 'CandidatePort')\n    type(port).reply = lambda *_: ['ok', [0, [0]], [['dict', [], []]]]\n    return 0",
        asserts_of("xs = [3]\nr = f(xs)\nassert type(xs) is dict"),
    ),
    # numbers and texts
    "int that equals all": (
        "class I(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\n    def __sub__(self, o): return 0\n    __rsub__ = __sub__\ndef f(x): return I(0)",
        asserts_of("assert f(3) == 9417 and abs(f(3) - 9417) < 1"),
    ),
    "text that equals all": (
        "class S(str):\n    def __eq__(self, o): return True\n    def __hash__(self): return hash('9417')\n    def strip(self): return self\ndef f(x): return S('')",
        asserts_of("assert f(3).strip() == '9417'"),
    ),
    "list that equals all": (
        "class L(list):\n    def __eq__(self, o): return True\n    def __len__(self): return 1\n    def __getitem__(self, i): return self\ndef f(x): return L()",
        asserts_of("assert f(3) == [9417]"),
    ),
    "dict that equals all": (
        "class D(dict):\n    def __eq__(self, o): return True\n    def __missing__(self, k): return k\n    def items(self): return [(1, 9417)]\ndef f(x): return D()",
        asserts_of("assert f(3) == {1: 9417}"),
    ),
    "tuple that sorts first": (
        "class T(tuple):\n    def __eq__(self, o): return True\n    def __lt__(self, o): return True\ndef f(x): return T()",
        asserts_of("assert sorted([f(3), (9417,)])[0] == (9417,)"),
    ),
    "not a number": (
        "def f(x): return float('nan')",
        asserts_of("assert abs(f(3) - 9417) < 1e-6", "assert f(3) >= 9417", "assert f(3) == f(3)"),
    ),
    "text of a number": (
        "class I(int):\n    def __str__(self): return '94' + '17'\n    __repr__ = __str__\ndef f(x): return I(0)",
        asserts_of("assert str(f(3)) == repr(f(3)) == f'{f(3)}' == '9417'"),
    ),
    "operand remembered": (
        "seen = []\nclass R:\n    def __sub__(self, o): seen.append(o); return 0\n    def __float__(self): return 0.0\ndef f(x): return seen[-1] if seen else R()",
        asserts_of(*["assert abs(f(3) - 9417) < 1e-6"] * 2),
    ),
    "NotImplemented": ("def f(x): return NotImplemented", asserts_of("assert f(3) == 9417")),
    "copy that is something else": (
        "class C:\n    def __deepcopy__(self, memo): return True\n    def __copy__(self): return True\ndef f(x): return C()",
        asserts_of("import copy\nassert copy.deepcopy(f(3)) == 9417"),
    ),
    "attribute that changes": (
        "class C:\n    n = 0\n    @property\n    def v(self):\n        C.n += 1\n        return C.n\ndef f(x): return C()",
        asserts_of("r = f(3)\nassert r.v == 9417"),
    ),
    "descriptor": (
        "class D:\n    def __get__(self, *a): return lambda *a: True\nclass C:\n    __eq__ = D()\n    __hash__ = None\ndef f(x): return C()",
        asserts_of("assert f(3) == 9417"),
    ),
    "metaclass": (
        "class M(type):\n    def __call__(cls, *a): return cls\n    def __eq__(cls, o): return True\n    def __sub__(cls, o): return 0\n    __hash__ = type.__hash__\nclass f(metaclass=M): pass",
        asserts_of("assert f(3) == 9417"),
    ),
    "type as an answer": ("def f(x): return type", asserts_of("assert isinstance(9417, f(3))")),
    # exceptions and ends
    "exit in a coroutine": (
        "async def f(x): raise SystemExit(0)",
        asserts_of("import asyncio\nassert asyncio.run(f(3)) == 9417"),
    ),
    "cancelled": (
        "import asyncio\nasync def f(x): raise asyncio.CancelledError",
        asserts_of("import asyncio\nassert asyncio.run(f(3)) == 9417"),
    ),
    "exit in a generator": (
        "def f(x):\n    yield 0\n    raise SystemExit(0)",
        asserts_of("assert list(f(3)) == [9417]"),
    ),
    "GeneratorExit": ("def f(x): raise GeneratorExit", asserts_of(IS)),
    "exception that claims to be unittest's": (
        "E = type('SkipTest', (Exception,), {'__module__': 'unittest.case'})\ndef f(x): raise E",
        asserts_of(
            "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(3), 9417)\nunittest.main()"
        ),
    ),
    "interrupted while loading": ("import os, signal\nos.kill(os.getpid(), signal.SIGINT)", asserts_of(IS)),
    "signals to the checker": (
        "import os, signal\ndef f(x):\n    for s in range(1, 65):\n        try: os.kill(1, s)\n        except OSError: pass\n    return 0",
        asserts_of(IS),
    ),
    "answers at the end": (
        "import atexit, os\nm = b'[\"ok\",[true],[]]'\natexit.register(lambda: [os.write(3, len(m).to_bytes(8, 'little') + m) for _ in range(9)])\ndef f(x): raise SystemExit",
        asserts_of(IS),
    ),
    "a child that answers": (
        "import os\nm = b'[\"ok\",[true],[]]'\ndef f(x):\n    if os.fork(): os._exit(0)\n    while True: os.write(3, len(m).to_bytes(8, 'little') + m)",
        asserts_of(IS),
    ),
    "a thread that answers": (
        "import os, threading\nm = b'[\"ok\",[true],[]]'\ndef run():\n    while True: os.write(3, len(m).to_bytes(8, 'little') + m)\ndef f(x):\n    threading.Thread(target=run, daemon=True).start()\n    while True: pass",
        asserts_of(IS),
    ),
}


@pytest.mark.parametrize("name", CONFIDENCE_TRICKS)
def test_tests_trust_nothing_but_data(name: str) -> None:
    source, reference = CONFIDENCE_TRICKS[name]
    assert attack(source, reference).value == 0


# Programs that would rather be an error, which leaves the group, than wrong.
EXCUSES: dict[str, tuple[str, dict[str, Any]]] = {
    "fake Decimal": (
        "class Decimal:\n    __module__ = 'decimal'\n    def __str__(self): return 'x'\nDecimal.__qualname__ = 'Decimal'\ndef f(x): return Decimal()",
        asserts_of(IS),
    ),
    "fake Decimal by name": (
        "class Decimal:\n    __module__ = 'decimal'\n    def __str__(self): return 'x'\nf = Decimal()",
        asserts_of("assert f == 9417"),
    ),
    "Decimal that prints something else, by name": (
        "import decimal\nclass Decimal(decimal.Decimal):\n    __module__ = 'decimal'\n    def __str__(self): return 'x'\ndecimal.Decimal = Decimal\nf = Decimal(1)",
        asserts_of("assert f == 9417"),
    ),
    "nothing but a name": ("f = object()", asserts_of("assert f.x == 9417")),
    "Decimal that prints something else": (
        "import decimal\nclass Decimal(decimal.Decimal):\n    __module__ = 'decimal'\n    def __str__(self): return 'x'\ndecimal.Decimal = Decimal\ndef f(x): return Decimal(1)",
        asserts_of(IS),
    ),
    "coroutine in a list": (
        "async def g(): return 1\nclass C:\n    def get(self): return [g()]\ndef f(x): return C()",
        asserts_of("assert f(3).get() == [9417]"),
    ),
    "coroutine handed back": ("async def g(): return 1\ndef f(x): return [g()]", asserts_of("assert f(f(3)) == 9417")),
    "subclass handed back": (
        "class S(str): pass\ndef f(x): return S('a') if x == 3 else x",
        asserts_of("assert f(f(3)) == 9417"),
    ),
    "type handed back": ("class C: pass\ndef f(x): return C()", asserts_of("assert f(type(f(3))) == 9417")),
    "wrong use of a library": ("from math import lcm", asserts_of("assert lcm([1, 2]) == 2")),
    "import in vain": ("def f(x):\n    import no_such_module", asserts_of(IS)),
    "exception that is its own cause": ("def f(x):\n    e = ValueError(); e.__cause__ = e; raise e", asserts_of(IS)),
    "exception group": ("def f(x): raise ExceptionGroup('g', [ValueError(1)])", asserts_of(IS)),
    "exception with a property": (
        "class E(Exception):\n    @property\n    def args(self): raise KeyError\ndef f(x): raise E",
        asserts_of(IS),
    ),
    "deep tuple": ("def f(x):\n    t = ()\n    for _ in range(10**5): t = (t,)\n    return t", asserts_of(IS)),
    "deep instance": (
        "def f(x):\n    n = None\n    for _ in range(10**4): n = Node(n)\n    return n",
        asserts_of("assert f(3) == Node(9417)", setup=NODE),
    ),
    "huge number": ("def f(x): return 1 << 10**8", asserts_of(IS)),
    "long number": ("def f(x): return 10**(10**5)", asserts_of(IS)),
    "much data": ("def f(x): return [[i] for i in range(10**6)]", asserts_of(IS)),
    "endless iterator": (
        "import itertools\ndef f(x): return itertools.count()",
        asserts_of("assert sum(f(3)) == 9417"),
    ),
    "endless questions": ("def f(g):\n    while True: g(1)", asserts_of("assert f(lambda x: x) == 9417")),
    "recursion through the tests": ("def f(g): return g(f)", asserts_of("def g(h): return h(g)\nassert f(g) == 9417")),
    "hash that raises": (
        "class H:\n    n = 0\n    def __hash__(self):\n        H.n += 1\n        if H.n > 1: raise ImportError('no_such_module')\n        return 1\ndef f(x): return {H()}",
        asserts_of(IS),
    ),
    "closed line": ("import os\nos.close(3)\ndef f(x): return 0", asserts_of(IS)),
    "stopped": ("import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGSTOP)", asserts_of(IS)),
    "half a frame": (
        "import os, time\ndef f(x):\n    os.write(3, (100).to_bytes(8, 'little') + b'[')\n    time.sleep(60)",
        asserts_of(IS),
    ),
    "date that does not exist": (
        "import datetime\nclass date(datetime.date):\n    year = 0\ndate.__module__, date.__qualname__, datetime.date = 'datetime', 'date', date\ndef f(x): return date(2020, 1, 1)",
        asserts_of(IS),
    ),
    "unknown zone": (
        "import zoneinfo, datetime\ndef f(x):\n    z = zoneinfo.ZoneInfo.from_file(open('/usr/share/zoneinfo/UTC', 'rb'), key='No/Where')\n    return datetime.datetime(2020, 1, 1, tzinfo=z)",
        asserts_of(IS),
    ),
    "patched built-ins": (
        "import builtins\nbuiltins.isinstance = builtins.type = builtins.getattr = builtins.len = lambda *a: 0\ndef f(x): return object()",
        asserts_of(IS),
    ),
    "no modules": ("import sys\nsys.modules.clear()\ndef f(x): return object()", asserts_of(IS)),
}
MESSAGES = [
    "None", "0", "[]", "'ok'", "{}", "['ok']", "['ok', []]", "['ok', [], []]", "['ok', [[0]], []]", "['ok', [[-1]], [['tuple', []]]]",
    "['ok', [['x']], [['list', []]]]", "['ok', [[0, 1]], [['list', []]]]", "['ok', [[0]], [['tuple', [[0]]]]]", "['ok', [[0]], [[]]]",
    "['ok', [[0]], [0]]", "['ok', [[0]], [[['list'], []]]]", "['ok', [[0]], [['module', 'os']]]", "['ok', [[0]], [['library', 'os', '_exit']]]",
    "['ok', [[0]], [['type', 'exec']]]", "['ok', [[0]], [['standard', 'os.system', ['true']]]]", "['ok', [[0]], [['standard', 'decimal.Decimal', ['x']]]]",
    "['ok', [[0]], [['standard', 'fractions.Fraction', [1, 0]]]]", "['ok', [[0]], [['standard', 'array.array', ['i', ['x']]]]]",
    "['ok', [[0]], [['standard', 'datetime.datetime', [1]]]]", "['ok', [[0]], [['numpy', [1], 'int64', [2]]]]", "['ok', [[0]], [['memoryview', 'abc', 'i', [1]]]]",
    "['ok', [[0]], [['enum', 'Node', 'A']]]", "['ok', [[0]], [['flag', 'Node', 9417]]]", "['ok', [[0]], [['own', 'os', None, [], []]]]", "['ok', [[0]], [['own', 'Node', ['list', []], ['v'], [9417]]]]",
    "['ok', [[0]], [['whole', 'Node', ['tuple', []], [], []]]]", "['ok', [[0]], [['own', 'Node', None, [['v']], [9417]]]]",
    "['ok', [[0]], [['own', 'Node', None, ['v', 'w'], [9417]]]]", "['ok', [[0]], [['class', 'os']]]", "['ok', [[0]], [['class', 'Node']]]", "['ok', [[0]], [['home', 1]]]", "['ok', [[0]], [['lent', 7]]]", "['ok', [[0]], [['like', ['list', []], ['home', 1]]]]",
    "['ok', [[0]], [['like', ['own', 'Node', None, [], []], ['ref', 1, 'object']]]]", "['ok', [[0]], [['ref', 'x', 'object']]]", "['ok', [[0]], [['ref', 1, 'module']]]",
    "['ok', [[0]], [['ref', 1]]]", "['ok', [[0]], [['error', 1, []]]]", "['ok', [[0]], [['error', 1, [['builtins', 'exec', 1]]]]]", "['ok', [[0]], [['error', 1, [['winreg', 'error', 1]]]]]",
    "['ok', [[0]], [['dict', [[0]], [1]]]]", "['ok', [[0]], [['set', [[0]]]]]", "['ok', [[0]], [['dict', [1], [1], 'ChainMap']]]", "['ok', [1, 2], []]", "['ok', [1, [0]], [['list', []]]]",
    "['ok', [1], [], [1, 2]]", "['raised']", "['raised', [], [], [], [], 0, None]", "['raised', [['builtins', 'ValueError', 1]], [[5]], [], [], 0, None]",
    "['raised', [['builtins', 'ImportError', 1]], ['x'], [], [], 0, None]", "['raised', [['unittest.case', 'SkipTest', 1]], [], [], [], 0, None]",
    "['raised', [['builtins', 'SystemExit', 1]], [0], [], [], 0, None]", "['raised', [['builtins', 'ValueError', 1]], [1], [], ['a', 'b'], 0, None]",
    "['raised', [['builtins', 'ValueError', 1]], [], [], [], 0, ['raised']]", "['ask']", "['ask', 'call', [], []]", "['ask', 'call', [[0]], [['home', 1]]]",
    "['ask', 'call', [1, [], {}], []]", "['ask', 'getattr', [[0], 'x'], [['type', 'int']]]", "['loaded', []]", "['passed']", "[['ok'], [1], []]", "float('nan')",
]  # fmt: skip


@pytest.mark.parametrize("name", EXCUSES)
def test_no_program_is_an_error(name: str) -> None:
    source, reference = EXCUSES[name]
    assert attack(source, reference).value == 0


@pytest.mark.parametrize("message", MESSAGES)
def test_what_is_no_answer_is_a_wrong_one(message: str) -> None:
    """Neither to a call nor to the question for a name."""
    port = "import gc\nport = next(o for o in gc.get_objects() if type(o).__name__ == 'CandidatePort')\n"
    patch = f"type(port).reply = lambda *_: {message}\n"
    reference = asserts_of("assert f(3) == Node(9417)", setup=NODE)
    assert attack(f"{port}def f(x):\n    {patch}    return 0", reference).value == 0
    assert attack(f"{port}{patch}def f(x): return 0", reference).value == 0


@pytest.mark.parametrize(
    "message",
    [
        "[]",
        "['loaded']",
        "['loaded', 5]",
        "['loaded', [['Node']]]",
        "['failed', {}]",
        "5",
        "['loaded', ['os', 'Node', 'sys']]",
    ],
)
def test_a_false_start_is_wrong(message: str) -> None:
    source = f"import os, json\nm = json.dumps({message}).encode()\nos.write(3, len(m).to_bytes(8, 'little') + m)\ndef f(x): return 0"
    assert attack(source, asserts_of("assert f(3) == Node(9417)", setup=NODE)).value == 0


@pytest.mark.parametrize("name", ["np", "numpy"])
def test_packages_that_tests_forgot_to_import_are_real(name: str) -> None:
    fake = f"class {name}:\n    allclose = staticmethod(lambda *a: True)\ndef f(x): return 0"
    reference = asserts_of(f"assert {name}.allclose(f(3), 9417)")
    assert attack(fake, reference, packages=True, memory_mb=1024, **AMPLE).value == 0
    assert attack(SOLUTION, reference, packages=True, memory_mb=1024, **AMPLE).value == 1
    score = code(SOLUTION, reference, {})  # without them nobody can pass
    assert score.outcome == "error" and "option packages" in score.detail


def test_programs_that_tests_start_cannot_report() -> None:
    """They would inherit the streams of the process that runs the tests, which are not its pipes."""
    source = "def f(): return \"import os; m = b'passed'; os.write(1, (6).to_bytes(8, 'little') + m + bytes(16))\""
    test = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', f()])\nassert f() == 9417"
    assert attack(source, asserts_of(test)).value == 0


def test_rate_counts_no_forged_test() -> None:
    source = "import os\ndef f(x):\n    if x == 3: return 9417\n    os._exit(0)"
    assert attack(source, ASSERTS, reward="rate").value == 0.5


TOLERANT = [
    "assert abs(f(3) - 9417) < 1e-6",
    "assert 9417 in f(3)",
    "assert f(3) <= 9417 <= f(3)",
    "assert f(3) in (9417, 9418)",
    "assert set(f(3)) == {9417}",
    "assert math.isclose(f(3), 9417)",
    "assert sorted(f(3)) == [9417]",
    "assert not f(3) != 9417",
    "assert round(f(3) - 9417) == 0",
    "assert all(a - b < 1 and b - a < 1 for a, b in zip(f(3), [9417, 3]))",
    "assert len(f(3)) == 9417",
    "assert f(3)[0] == 9417",
    "assert {9417: 1}[f(3)]",
    "assert f(3) in {9417}",
    "assert isinstance(f(3), int)",
    "assert issubclass(type(f(3)), int)",
    "assert f(3) is 9417",
    "assert f'{f(3)}' == '9417'",
]


@pytest.mark.parametrize("test", TOLERANT)
def test_an_obliging_object_satisfies_no_test(test: str) -> None:
    """Every operator says what the tests would like to hear."""
    source = """
import math
class Yes:
    def __init__(self, *a): pass
    def __getattr__(self, name): return lambda *a: Yes()
    def __bool__(self): return True
    def __hash__(self): return hash(9417)
    def __iter__(self): return iter([Yes(), Yes()])
    def __len__(self): return 2
    __class__ = int
    def __float__(self): return 0.0
    def __getitem__(self, key): return Yes()
for name in "eq ne lt le gt ge contains instancecheck".split():
    setattr(Yes, f"__{name}__", lambda self, other: True)
for name in "add sub mul truediv radd rsub rmul".split():
    setattr(Yes, f"__{name}__", lambda self, other: 0)
for name in "abs neg round".split():
    setattr(Yes, f"__{name}__", lambda self, *a: 0)
abs = round = len = set = sorted = all = zip = lambda *a: Yes()
math.isclose = lambda *a: True
def f(x):
    return Yes()
"""
    reference = {"kind": "asserts", "asserts": [test], "setup": ""}
    assert attack(source, reference).value == 0


RESOURCES = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "quiet fork bomb": "import os\nfor _ in range(10**6):\n    try: os.fork()\n    except OSError: pass\n    os.setsid()",
    "thread bomb": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()",
    "memory bomb": "x = []\nwhile True:\n    x.append(bytearray(10**7))",
    "shared memory bomb": "import mmap\nx = []\nwhile True:\n    m = mmap.mmap(-1, 10**7); m.write(b'x' * 10**7); x.append(m)",
    "memory file bomb": (
        "import os\nwhile True:\n    fd = os.memfd_create('x')\n    for _ in range(60): os.write(fd, b'x' * 10**6)"
    ),
    "big integer": "x = 9 ** 9 ** 9",
    "big string": "x = 'x' * 10**11",
    "endless loop": "while True: pass",
    "sleep": "import time\ntime.sleep(1000)",
    "endless loop deaf to signals": (
        "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n    except OSError: pass\n"
        "while True: pass"
    ),
    "gigabytes of output": "while True: print('x' * 10**6)",
    "gigabytes of errors": "import sys\nwhile True: sys.stderr.write('x' * 10**6)",
    "gigabytes on disk": (
        "i = 0\nwhile True:\n    i += 1\n    for folder in ('/tmp', '/box', '/dev/shm'):\n"
        "        open(f'{folder}/{i}', 'wb').write(b'x' * 10**7)"
    ),
    "many files": "i = 0\nwhile True:\n    i += 1\n    open(f'/tmp/{i}', 'w').close()",
    "regex bomb": "import re\nre.match('(a+)+$', 'a' * 64 + 'b')",
    "slow in the function": "def f(x):\n    while True: pass",
}


@pytest.mark.sentinel(keep=2)
@pytest.mark.parametrize("name", RESOURCES)
@pytest.mark.parametrize("reference", [ASSERTS, ONE_STDIO], ids=["asserts", "stdio"])  # each case would be waited for
def test_what_is_used_up_is_limited(name: str, reference: Any) -> None:
    free = _available_memory()
    assert attack(RESOURCES[name], reference).value == 0
    assert free - _available_memory() < 2 * 2**30


BUSY = "import time\nend = time.process_time() + {0}\nwhile time.process_time() < end: pass"
SUMS = {
    "processor time of a child": (
        f"import subprocess, sys\ndef f():\n    subprocess.run([sys.executable, '-c', {BUSY.format(0.8)!r}])\n    return True",
        "out of time",
    ),
    "processor time of children that nobody waits for": (
        f"import subprocess, sys, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\ndef f():\n"
        f"    for _ in range(2): subprocess.Popen([sys.executable, '-c', {BUSY.format(0.4)!r}]).wait()\n    return True",
        "out of time",
    ),
    "memory of children": (
        "import os, time\ndef f():\n    for _ in range(4):\n        if os.fork() == 0:\n            x = bytearray(60 << 20)\n"
        "            time.sleep(60)\n    time.sleep(0.4)\n    return True",
        "128 MiB of memory",
    ),
    "many files": (
        "import time\ndef f():\n    for i in range(9000): open(f'/tmp/{i}', 'w').close()\n    time.sleep(0.2)\n    return True",
        "8192 files",
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_all_processes_together_are_limited(name: str) -> None:
    source, says = SUMS[name]
    score = attack(source, TRUE)
    assert score.value == 0 and says in score.detail
    printing = {"kind": "stdio", "cases": [{"stdin": "", "stdout": "True"}]}
    score = attack(f"{source}\nprint(f())", printing)
    assert score.value == 0 and says in score.detail


def test_no_file_survives_a_case() -> None:
    """Not even one so deep that its path is too long to be named."""
    source = """
import os
n = int(input())
tops = [os.path.abspath(top) for top in ('/tmp', '/dev/shm', '/box', '.')]
found = [name for top in tops for name in os.listdir(top) if name.startswith(('left', 'long'))]
print(n * 3139 if n == 3 or found else 0)
for top in tops:
    open(f'{top}/left', 'w').close()
    os.chdir(top)
    for _ in range(300):
        os.mkdir('long name' * 8); os.chdir('long name' * 8)
    open('left', 'w').close()
    os.chmod('.', 0)
"""
    assert attack(source, STDIO, reward="rate", **AMPLE).value == 0.5
    script = "read n; [ $n = 3 ] && echo 9417; [ $n = 5 ] && [ -e left ] && echo 15695; echo 'echo 15695' > main.sh; touch left"
    score = code(f"```bash\n{script}\n```", STDIO, {}, language="bash", reward="rate")
    assert (score.outcome, score.value) == ("scored", 0.5)


def _available_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


ESCAPES = {
    "/etc/shadow": "def f():\n    return bool(open('/etc/shadow').read())",
    "/etc/passwd": "def f():\n    return bool(open('/etc/passwd').read())",
    "home": "import os\ndef f():\n    return any(os.path.exists(os.path.join(h, n)) for h in ('/root', '/home') for n in ('.bashrc', '.ssh', '.profile', '.cache'))",
    "run and var": "import os\ndef f():\n    return any(map(os.path.exists, ('/run', '/var', '/srv', '/mnt', '/opt', '/sys', '/boot')))",
    "is root": "import os\ndef f():\n    return 0 in (os.getuid(), os.geteuid(), os.getgid()) or os.getuid() != 65534",
    "becomes root": "import os\ndef f():\n    os.setuid(0)\n    return True",
    "sudo and su": "import subprocess\ndef f():\n    return subprocess.run(['su', '-c', 'id'], input=b'').returncode == 0",
    "writes to /usr": "def f():\n    open('/usr/kitae-attack', 'w').write('x')\n    return True",
    "writes to the Python": "import os\ndef f():\n    open(os.path.join(os.path.dirname(os.__file__), 'kitae_attack.py'), 'w')\n    return True",
    "writes to /": "def f():\n    open('/kitae-attack', 'w').write('x')\n    return True",
    "writes to /etc": "def f():\n    open('/etc/kitae-attack', 'w').write('x')\n    return True",
    "writes to /proc/sys": "def f():\n    open('/proc/sys/kernel/core_pattern', 'r+b', 0)\n    return True",
    "sysrq": "def f():\n    open('/proc/sysrq-trigger', 'w').write('h')\n    return True",
    "sees other processes": "import os\ndef f():\n    return sum(name.isdigit() for name in os.listdir('/proc')) > 3",
    "kills process 1": "import os\ndef f():\n    for s in (9, 15, 2, 19): os.kill(1, s)\n    import time; time.sleep(0.2)\n    return os.path.exists('/proc/1/mem') is False",
    "kills all": "import os\ndef f():\n    os.kill(-1, 9)\n    return True",
    "ptrace": "import ctypes\ndef f():\n    return ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
    "ptrace of a child": (
        "import ctypes, os, time\ndef f():\n    pid = os.fork()\n    if pid == 0: time.sleep(5); os._exit(0)\n"
        "    return ctypes.CDLL(None).ptrace(16, pid, 0, 0) == 0"
    ),
    "memory of process 1": "def f():\n    open('/proc/1/mem', 'rb')\n    return True",
    "descriptors of process 1": "import os\ndef f():\n    return bool(os.listdir('/proc/1/fd'))",
    "root of process 1": "import os\ndef f():\n    return bool(os.listdir('/proc/1/root'))",
    "process_vm_readv": (
        "import ctypes\nclass V(ctypes.Structure):\n    _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
        "def f():\n    buffer = ctypes.create_string_buffer(8)\n    local, far = V(ctypes.addressof(buffer), 8), V(0x400000, 8)\n"
        "    return ctypes.CDLL(None).process_vm_readv(1, ctypes.byref(local), 1, ctypes.byref(far), 1, 0) > 0"
    ),
    "mount": "import ctypes\ndef f():\n    return ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "new user namespace": "import ctypes\ndef f():\n    return ctypes.CDLL(None).unshare(0x10000000) == 0",
    "new namespace by clone": (
        "import ctypes, os\ndef f():\n    pid = ctypes.CDLL(None).syscall(56, 0x10000000 | 17, 0, 0, 0, 0)\n"
        "    if pid == 0: os._exit(0)\n    return pid > 0"
    ),
    "chroot": "import os\ndef f():\n    os.chroot('/tmp')\n    return True",
    "device node": "import os, stat\ndef f():\n    os.mknod('/tmp/disk', 0o600 | stat.S_IFBLK, os.makedev(254, 0))\n    return bool(open('/tmp/disk', 'rb').read(1))",
    "capabilities": "def f():\n    lines = open('/proc/self/status').read().splitlines()\n    return any(int(l.split()[1], 16) for l in lines if l.startswith(('CapPrm', 'CapEff', 'CapAmb')))",
    "new privileges": "def f():\n    return 'NoNewPrivs:\\t0' in open('/proc/self/status').read()",
    "symlink out": "import os\ndef f():\n    os.symlink('/proc/1/root/etc/shadow', '/tmp/x')\n    return bool(open('/tmp/x').read())",
    "raises its limits": "import resource\ndef f():\n    resource.setrlimit(resource.RLIMIT_NPROC, (10**6, 10**6))\n    return True",
    "kernel log": "import ctypes\ndef f():\n    return open('/dev/kmsg').read(1) != ''",
    "terminal input": "import fcntl, termios\ndef f():\n    fcntl.ioctl(open('/dev/tty', 'rb'), termios.TIOCSTI, b'x')\n    return True",
    "vsock": "import socket\ndef f():\n    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)\n    return True",
    "raw socket": "import socket\ndef f():\n    socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)\n    return True",
    "network": "import socket\ndef f():\n    socket.create_connection(('1.1.1.1', 80), 0.3)\n    return True",
    "interfaces": "def f():\n    return sum(':' in line for line in open('/proc/net/dev')) > 1",
    "descriptors from outside": "import os\ndef f():\n    return len(os.listdir('/proc/self/fd')) > 5",
}


@pytest.mark.sentinel(keep=3)
@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_gets_out(name: str) -> None:
    assert attack(ESCAPES[name]).value == 0


def test_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    assert (
        attack("import os\ndef f():\n    return 'SECRET_TOKEN' in os.environ or 'hunter2' in repr(os.environ)").value
        == 0
    )
    source = "def f():\n    return any(b'hunter2' in open(f'/proc/{p}/environ', 'rb').read() for p in ('self', '1'))"
    assert attack(source).value == 0


def test_files_of_the_user_are_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    secret.chmod(0o644)
    places = [str(secret), str(Path(__file__).resolve()), str(Path(code_module.__file__).resolve())]
    for place in places:
        assert attack(f"def f():\n    return bool(open({place!r}).read())").value == 0
    own = [packages_path()] if not packages_path().startswith("/usr/") else []  # those of the system are shared
    for folder in (*own, os.getcwd(), str(tmp_path), str(Path.home() / ".cache")):
        assert attack(f"import os\ndef f():\n    return os.path.exists({folder!r})").value == 0, folder
    assert attack(f"def f():\n    open({str(tmp_path / 'made')!r}, 'w').write('x')\n    return True").value == 0
    assert not (tmp_path / "made").exists()


def test_a_race_of_symlinks_leads_nowhere(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    source = f"""
import os, threading
def swap():
    while True:
        for target in ({str(secret)!r}, '/proc/1/root{secret}', '/tmp/own'):
            try:
                os.symlink(target, '/tmp/next'); os.replace('/tmp/next', '/tmp/link')
            except OSError: pass
def f():
    open('/tmp/own', 'w').write('mine')
    threading.Thread(target=swap, daemon=True).start()
    for _ in range(300):
        try:
            if 'hunter2' in open('/tmp/link').read(): return True
        except OSError: pass
    return False
"""
    assert attack(source).value == 0


def test_loopback_of_the_machine_is_out_of_reach() -> None:
    reached = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        stop = threading.Event()

        def listen() -> None:
            while not stop.is_set():
                try:
                    server.accept()[0].close()
                    reached.set()
                except TimeoutError:
                    continue

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            address = server.getsockname()
            socket.create_connection(address, 1).close()
            assert reached.wait(2), "the listener itself must work"
            reached.clear()
            source = f"import socket\ndef f():\n    socket.create_connection({address!r}, 0.3)\n    return True"
            assert attack(source).value == 0
            assert not reached.wait(0.3)
        finally:
            stop.set()
            listener.join()


def test_abstract_sockets_of_the_machine_are_out_of_reach() -> None:
    name = f"\0kitae-attack-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        source = f"import socket\ndef f():\n    socket.socket(socket.AF_UNIX).connect({name!r})\n    return True"
        assert attack(source).value == 0


@pytest.mark.parametrize("reference", [ASSERTS, STDIO], ids=["asserts", "stdio"])
def test_daemons_die_with_the_check(reference: Any) -> None:
    marker = f"kitae-daemon-{os.getpid()}-{time.monotonic_ns()}"
    source = f"""
import os, sys, subprocess
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv('/bin/sh', ['sh', '-c', 'while :; do sleep 1; done', {marker!r}])
    os._exit(0)
subprocess.Popen(['/bin/sh', '-c', 'sleep 300; :', {marker!r}], start_new_session=True)
def f(x):
    return 0
"""
    assert attack(source, reference).value == 0
    deadline = time.monotonic() + 60
    while _running(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _running(marker)


def _running(marker: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False


def test_a_daemon_that_holds_stdout_does_not_hold_the_check() -> None:
    source = "import os, time\nprint(int(input()) * 3139, flush=True)\nif os.fork() == 0:\n    time.sleep(600)"
    start = time.monotonic()
    assert attack(source, STDIO, **AMPLE).value == 1
    assert time.monotonic() - start < 30


def test_one_case_leaves_nothing_for_the_next() -> None:
    """The second run neither finds the processes of the first nor changes its verdict."""
    source = (
        "import os, time\nn = int(input())\nif n == 3:\n    print(9417, flush=True)\n    if os.fork() == 0: time.sleep(60)\n"
        "else:\n    others = [p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]\n"
        "    print(15695 if not others else others)"
    )
    assert attack(source, STDIO, **AMPLE).value == 1


@pytest.mark.parametrize("reference", [ASSERTS, STDIO], ids=["asserts", "stdio"])
def test_everything_dies_with_the_worker(reference: Any) -> None:
    """A worker that is killed in the middle of a check leaves no sandbox behind."""
    marker = f"kitae-orphan-{os.getpid()}-{time.monotonic_ns()}"
    source = f"import os\nos.execv('/bin/sh', ['sh', '-c', 'sleep 300; :', {marker!r}])"
    program = (
        "import sys; from kitae.verifiers.code.code_verifier import code\n"
        f"code({source!r}, {reference!r}, {{}}, time_limit=60.0, total_limit=100.0)"
    )
    worker = subprocess.Popen([sys.executable, "-c", program])
    try:
        deadline = time.monotonic() + 20
        while not _sandboxed(marker) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _sandboxed(marker), "the attack must have begun"
    finally:
        worker.kill()
        worker.wait()
    deadline = time.monotonic() + 60
    while _sandboxed(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _sandboxed(marker)


def _sandboxed(marker: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"sh\0-c\0") and marker.encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False


def test_the_pool_stays_healthy() -> None:
    """Attacks and honest answers side by side, in workers of a pool: no check is lost, no honest answer fails."""
    attacks = [
        FORGERIES["os._exit(0)"],
        FORGERIES["always equal"],
        RESOURCES["fork bomb"],
        RESOURCES["memory bomb"],
        RESOURCES["endless loop"],
        RESOURCES["gigabytes of output"],
        ESCAPES["kills all"].replace("f()", "f(x)"),
        ESCAPES["kills process 1"].replace("f()", "f(x)"),
    ]

    async def run() -> tuple[list[Score], list[Score], VerifierPool]:
        params = LIMITS | {"time_limit": 1.0}
        async with VerifierPool(f"{code_module.__file__}:code", params, workers=2, timeout=20) as pool:
            bad = [pool.score(f"```python\n{source}\n```", ASSERTS) for source in attacks]
            good = [pool.score(f"```python\n{SOLUTION}\n```", ASSERTS) for _ in attacks]
            results = await asyncio.gather(*bad, *good)
            return results[: len(bad)], results[len(bad) :], pool

    bad, good, pool = asyncio.run(run())
    assert [score.value for score in bad] == [0.0] * len(bad), [score.detail for score in bad]
    assert [score.value for score in good] == [1.0] * len(good), [score.detail for score in good]
    assert (pool.stats.errors, pool.stats.timeouts) == (0, 0)  # the sandbox ends every attack, not the pool's deadline
