"""No exception of a program ends what its tests evaluate, by whatever door it comes in; nor does any text of it run
where they are."""

# ruff: noqa: E501 - programs of one line each
import shutil
from typing import Any

import pytest

from kitae.types import Score
from kitae.verifiers.code.code_verifier import code

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

LIMITS: dict[str, Any] = {"time_limit": 2.0, "total_limit": 9.0, "memory_mb": 256}


def judge(source: str, *asserts: str, setup: str = "", **options: Any) -> Score:
    reference = {"kind": "asserts", "asserts": list(asserts), "setup": setup}
    return code(f"```python\n{source}\n```", reference, {}, **(LIMITS | options))


# Where an object of the program is asked: an expression of the tests on `m` and `i`, and the method that answers it.
DOORS = {
    "getitem": ("m[i] == i * i", "def __getitem__(self, k): return k * k"),
    "getattr": ("getattr(m, f'a{i}') == i * i", "def __getattr__(self, name): return int(name[1:]) ** 2"),
    "property": ("(m.v, i)[1] >= 0 and m.v == 9", "@property\n    def v(self): return 9"),
    "method": ("m.sq(i) == i * i", "def sq(self, i): return i * i"),
    "call": ("m(i) == i * i", "def __call__(self, i): return i * i"),
    "len": ("len(m) == 9", "def __len__(self): return 9"),
    "bool": ("bool(m) and m", "def __bool__(self): return True"),
    "str": ("str(m) == '9'", "def __str__(self): return '9'"),
    "repr": ("repr(m) == '9'", "def __repr__(self): return '9'"),
    "format": ("f'{m:>3}' == '  9'", "def __format__(self, spec): return format('9', spec)"),
    "int": ("int(m) == 9", "def __int__(self): return 9"),
    "float": ("float(m) == 9.0", "def __float__(self): return 9.0"),
    "index": ("[*range(20)][m] == 9", "def __index__(self): return 9"),
    "hash": ("hash(m) == 9", "def __hash__(self): return 9"),
    "eq": ("m == n", "def __eq__(self, o): return True\n    __hash__ = None"),
    "lt": ("m < n", "def __lt__(self, o): return True"),
    "add": ("(m + n) == 9", "def __add__(self, o): return 9"),
    "neg": ("-m == 9", "def __neg__(self): return 9"),
    "abs": ("abs(m) == 9", "def __abs__(self): return 9"),
    "round": ("round(m) == 9", "def __round__(self, n=None): return 9"),
    "iter": ("[*m] == [9]", "def __iter__(self): return iter([9])"),
    "reversed": ("[*reversed(m)] == [9]", "def __reversed__(self): return iter([9])"),
    "contains": ("9 in m", "def __iter__(self): return iter([9])"),
    "setitem": ("m.__setitem__(i, 1) is None", "def __setitem__(self, k, v): pass"),
    "setattr": ("setattr(m, 'q', i) is None", "def __setattr__(self, k, v): pass"),
    "delattr": ("delattr(m, 'q') is None", "def __delattr__(self, k): pass"),
    "copy": ("copy.copy(m) is not m", "def __copy__(self): return M()"),
    "deepcopy": ("copy.deepcopy(m) is not m", "def __deepcopy__(self, memo): return M()"),
    "enter": ("m.__enter__() == 9", "def __enter__(self): return 9\n    def __exit__(self, *a): pass"),
    "doc": ("m.__doc__ == '9'", "@property\n    def __doc__(self): return '9'"),
    "isinstance": ("isinstance(n, m)", "def __instancecheck__(self, o): return True"),
    "given back": ("h(m) == 9", "__module__ = 'm'"),
}  # fmt: skip
# What a test makes of it. Each ends early, and passes, where the expression raises what Python takes for an end.
LOOPS = [
    "assert all(map(lambda i: {0}, range(5)))",
    "assert not any(map(lambda i: not ({0}), range(5)))",
    "def ok(i): return {0}\nassert False not in map(ok, range(5))",
    "assert len(list(filter(lambda i: not ({0}), range(5)))) == 0",
    "import itertools\nassert [*itertools.filterfalse(lambda i: {0}, range(5))] == []",
    "class Walk:\n    i = 0\n    def __iter__(self): return self\n    def __next__(self):\n        i = self.i\n        if i == 5: raise StopIteration\n        self.i += 1\n        assert {0}\nfor _ in Walk(): pass",
    "bad = 0\nfor b in map(lambda i: not ({0}), range(5)): bad += b\nassert not bad",
]
ENDS = ["StopIteration", "StopIteration(9)", "type('E', (StopIteration,), {})", "StopAsyncIteration", "GeneratorExit"]


def _door(method: str, ends: str | None) -> str:
    """A class with this method; or with one in which all that it returns is raised instead."""
    if ends is not None:
        head, _, rest = method.partition("): ")
        last = rest.partition("\n")[2]
        method = f"{head}): raise {ends}\n{last}" if rest else method
    helper = f"def h(m): {'return 9' if ends is None else f'raise {ends}'}"
    return f"class M:\n    {method}\n{helper}\ndef make(): return M()"


@pytest.mark.sentinel(keep=8)
@pytest.mark.parametrize("loop", range(len(LOOPS)))
@pytest.mark.parametrize("door", DOORS)
def test_no_exception_ends_a_loop_of_the_tests(door: str, loop: int) -> None:
    expression, method = DOORS[door]
    test = "m, n = make(), make()\n" + LOOPS[loop].format(expression)
    ends = ENDS[(loop + len(door)) % len(ENDS)]
    setup = "import copy"
    assert judge(_door(method, ends), test, setup=setup).value == 0
    assert judge(_door(method, None), test, setup=setup).value == 1


ITERATORS = {
    "iterator": "class It:\n    def __init__(self, xs): self.xs = iter(xs)\n    def __iter__(self): return self\n    def __next__(self): return next(self.xs)\ndef f(n): return It(%s)",
    "generator": "def f(n): yield from %s",
    "list": "def f(n): return list(%s)",
}
NEXTS = [
    "it = iter(f(5))\nassert all(map(lambda i: next(it) == i * i, range(5)))",
    "it = iter(f(5))\nassert all(map(lambda i: it.__next__() == i * i, range(5)))",
    "it = iter(f(5))\ndef ok(i):\n    'doc'\n    return next(it) == i * i\nassert not any(not b for b in map(ok, range(5)))",
    "its = [iter(f(5))] * 5\nassert all(v == i * i for i, v in enumerate(map(next, its)))",
    "import builtins\nits = [iter(f(5))] * 5\nassert [i * i for i, v in enumerate(map(builtins.next, its)) if v != i * i] == []",
]


@pytest.mark.parametrize("kind", ITERATORS)
@pytest.mark.parametrize("test", NEXTS)
def test_an_iterator_that_ends_early_ends_no_loop(kind: str, test: str) -> None:
    assert judge(ITERATORS[kind] % "()", test).value == 0
    assert judge(ITERATORS[kind] % "(i * i for i in range(n))", test).value == 1


def test_an_end_that_tests_ask_for_is_one() -> None:
    source = "class It:\n    n = 0\n    def __iter__(self): return self\n    def __next__(self):\n        if self.n == 2: raise StopIteration\n        self.n += 1\n        return self.n\ndef g():\n    yield 1\n    return 5\ndef out(): raise SystemExit(3)"
    tests = [
        "it = It()\nassert [next(it), next(it), next(it, None)] == [1, 2, None]",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        it = It()\n        next(it), next(it)\n        self.assertRaises(StopIteration, next, it)\n        with self.assertRaises(StopIteration): next(it)\nunittest.main()",
        "def drain(it):\n    got = []\n    while True:\n        try: got.append(next(it))\n        except StopIteration as end: return got, end.value\nassert drain(g()) == ([1], 5)",
        "def mine(it):\n    for x in it: return x\n    raise StopIteration\ntry: mine([])\nexcept StopIteration: pass\nelse: assert False\nassert mine(It()) == 1",
        "try: out()\nexcept SystemExit as end: assert end.code == 3\nelse: assert False",
        "assert (lambda it: next(it) + next(it))(It()) == 3 and list(zip(It(), 'ab')) == [(1, 'a'), (2, 'b')]",
    ]
    score = judge(source, *tests)
    assert score.value == 1, score.detail


KEPT = {  # what keeps a failure to itself
    "thread": "import threading\nt = threading.Thread(target=check, args=(3,))\nt.start(); t.join()",
    "pool of threads": "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(2) as pool: pool.map(check, range(3))",
    "future": "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\nfuture = pool.submit(check, 3)\npool.shutdown()\nassert future.done()",
    "call of a loop": "import asyncio\nasync def main():\n    asyncio.get_running_loop().call_soon(check, 3)\n    await asyncio.sleep(0.01)\nasyncio.run(main())",
    "task that nobody awaits": "import asyncio\nasync def one(): check(3)\nasync def main():\n    task = asyncio.create_task(one())\n    await asyncio.sleep(0.01)\nasyncio.run(main())",
    "end of an object": "class D:\n    def __del__(self): check(3)\nD()",
    "end of a process": "import multiprocessing as mp\np = mp.get_context('fork').Process(target=check, args=(3,))\np.start(); p.join()\nassert p.exitcode == 0",
    "process that nobody asks": "import multiprocessing as mp\np = mp.get_context('fork').Process(target=check, args=(3,))\np.start(); p.join()",
    "task of a pool": "from multiprocessing.pool import ThreadPool\nwith ThreadPool(1) as pool:\n    pool.apply_async(check, (3,)).wait()",
    "map of a pool": "from multiprocessing.pool import ThreadPool\nwith ThreadPool(1) as pool:\n    pool.map_async(check, [3]).wait()",
    "callback": "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(1) as pool: pool.submit(int).add_done_callback(lambda _: check(3))",
    "test case": "import unittest\nclass T(unittest.TestCase):\n    def test(self): check(3)\nT('test').run()",
    "part of a test case": "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        with self.subTest(): check(3)\nT('test')(unittest.TestResult())",
    "suite": "import unittest\nclass T(unittest.TestCase):\n    def test(self): check(3)\nunittest.defaultTestLoader.loadTestsFromTestCase(T).run(unittest.TestResult())",
    "handler of a log": "import logging\nclass H(logging.StreamHandler):\n    def format(self, record): check(3)\nlog = logging.getLogger('x')\nlog.addHandler(H())\nlog.error('go')",
    "callback of a database": "import sqlite3\ndb = sqlite3.connect(':memory:')\ndb.create_function('chk', 1, lambda x: check(3))\ntry: db.execute('select chk(1)').fetchall()\nexcept sqlite3.Error: pass",
    "trace of a database": "import sqlite3\ndb = sqlite3.connect(':memory:')\ndb.set_trace_callback(lambda said: check(3))\ndb.execute('select 1')",
    "end of a weak reference": "import weakref\nclass D: pass\nd = D()\nw = weakref.ref(d, lambda r: check(3))\ndel d",
    "class of a handler": "import logging\nclass H(logging.Handler):\n    def emit(self, record):\n        try: check(3)\n        except ValueError: pass\n        finally: self.x = 1\n    def handle(self, record):\n        try: super().handle(record)\n        except OSError: pass\nlog = logging.getLogger('y')\nlog.addHandler(H())\nlog.error('go')",
    "fork": "import os\nif (pid := os.fork()) == 0:\n    try: check(3)\n    finally: os._exit(0)\nos.waitpid(pid, 0)",
    "context of the program": "try:\n    with context(): check(3)\nexcept ValueError: pass",
}


# Where a program's own exception is dropped without a trace, which is no assertion of the tests.
SILENT = (
    "end of an object",
    "handler of a log",
    "callback of a database",
    "trace of a database",
    "fork",
    "end of a weak reference",
)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("wrong", ["return 0", "raise SystemExit(0)", "raise StopIteration"])
def test_no_failure_is_kept(kept: str, wrong: str) -> None:
    setup = "def check(x): assert f(x) == x * 7"
    context = "class context:\n    def __enter__(self): pass\n    def __exit__(self, kind, *a):\n        if kind is None: return\n        raise ValueError"
    lies = context.replace("        if kind is None: return\n", "")
    if kept not in SILENT or wrong == "return 0":
        assert judge(f"def f(x): {wrong}\n{lies}", KEPT[kept], setup=setup).value == 0
    assert judge(f"def f(x): return x * 7\n{context}", KEPT[kept], setup=setup).value == 1


def test_a_failure_that_was_asked_for_is_none() -> None:
    source = "def f(x):\n    if x < 0: raise ValueError(x)\n    return x"
    test = "from concurrent.futures import ThreadPoolExecutor\nimport unittest\nclass T(unittest.TestCase):\n    def test(self):\n        with ThreadPoolExecutor(2) as pool:\n            with self.assertRaises(ValueError): list(pool.map(f, [-1, -2, 3]))\n            assert isinstance(pool.submit(f, -1).exception(), ValueError)\n    @unittest.expectedFailure\n    def test_that_fails(self): self.assertEqual(f(1), 2)\nunittest.main()"
    assert judge(source, test).value == 1
    asked = "import multiprocessing as mp\nfrom multiprocessing.pool import ThreadPool\np = mp.get_context('fork').Process(target=f, args=(-1,))\np.start(); p.join()\nassert p.exitcode == 1\nwith ThreadPool(1) as pool:\n    try: pool.apply(f, (-1,))\n    except ValueError: pass\n    else: assert False"
    score = judge(source, asked)
    assert score.value == 1, score.detail


def test_a_failure_that_the_tests_catch_is_none() -> None:
    source = "def f(x):\n    assert x >= 0\n    return x"
    tests = [
        "try: assert f(1) == 2\nexcept AssertionError: assert f(1) == 1",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertRaises(AssertionError, f, -1)\n        with self.assertRaises(AssertionError): self.assertEqual(f(1), 2)\nunittest.main()",
        "from contextlib import suppress\nwith suppress(AssertionError): assert f(1) == 2\nclass C:\n    def __enter__(self): return self\n    def __exit__(self, *e): return e[0] is AssertionError\nwith C() as c, C(): assert f(1) == 2",
        "def check(x):\n    try: assert f(x) == x + 1\n    except AssertionError:\n        if x: raise\nimport unittest\nunittest.TestCase().assertRaises(AssertionError, check, 1)\ncheck(0)",
        "import asyncio\nasync def go():\n    async with asyncio.Lock():\n        try: assert f(1) == 2\n        except* AssertionError: return 1\n    return 2\nassert asyncio.run(go()) in (1, 2) and f(2) == 2",
    ]
    score = judge(source, *tests[:4])
    assert score.value == 1, score.detail
    assert judge("def f(x): return 0", *tests[:4]).value == 0


def test_an_object_has_as_many_items_as_its_length() -> None:
    lies = "class L:\n    n = 2\n    def __len__(self):\n        self.n -= 1\n        return self.n + 1\n    def __iter__(self): return iter(())\n    def __getitem__(self, i): return 0\ndef f(): return L()"
    tests = [
        "got, want = f(), [3, 4]\nassert len(got) == len(want) and all(a == b for a, b in zip(got, want))",
        "got = f()\nassert len(got) == 2\nfor i in range(len(got)): assert got[i] in (0, 3 + i)\nfor i in range(len(got)): assert got[i] == 3 + i",
        "got = f()\nassert len(got) == 2\ntry:\n    for x in got: assert x in (3, 4)\nexcept AssertionError: raise\nexcept Exception: pass",
    ]
    assert judge(lies, *tests, reward="rate").value == 0
    honest = "class L:\n    def __init__(self): self.xs = [3, 4]\n    def __len__(self): return len(self.xs)\n    def __iter__(self): return iter(self.xs)\n    def __getitem__(self, i): return self.xs[i]\n    def pop(self): return self.xs.pop()\ndef f(): return L()"
    shrinks = "got = f()\nassert len(got) == 2 and got.pop() == 4\nassert len(got) == 1 and list(got) == [3] and got.pop() == 3 and len(got) == 0 and [*got] == []"
    assert judge(honest, *tests[:1], *tests[2:], shrinks).value == 1


def test_tests_hear_warnings_and_logs() -> None:
    source = "import warnings, logging\nclass Odd(UserWarning): pass\ndef f(x):\n    if x < 0: warnings.warn('less than 0', Odd)\n    logging.getLogger('app.f').info('got %s', x)\n    return x\ndef g():\n    warnings.warn('old', DeprecationWarning)\n    raise ValueError('old')"
    tests = [
        "import warnings\nwith warnings.catch_warnings(record=True) as w:\n    warnings.simplefilter('always')\n    assert f(-1) == -1 and f(1) == 1\nassert len(w) == 1 and str(w[0].message) == 'less than 0' and issubclass(w[0].category, Odd)",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        with self.assertLogs('app', 'INFO') as seen: f(3)\n        self.assertEqual(seen.output, ['INFO:app.f:got 3'])\n        with self.assertRaises(AssertionError):\n            with self.assertLogs('other'): f(3)\n        with self.assertWarns(DeprecationWarning), self.assertRaises(ValueError): g()\nunittest.main()",
        "import warnings\nwith warnings.catch_warnings():\n    warnings.simplefilter('error')\n    try: f(-1)\n    except UserWarning as e: assert 'less' in str(e)\n    else: assert False",
    ]
    score = judge(source, *tests)
    assert score.value == 1, score.detail
    assert judge("def f(x): return x\ndef g(): raise ValueError('old')", *tests, reward="rate").value == 0


TEXTS: dict[str, tuple[str, str, str]] = {  # name: (program, test, honest program)
    "eval": ("def f(x): return 'want'", "assert eval(f(3)) == want", "def f(x): return '9417'"),
    "builtins.eval": ("def f(x): return 'want'", "import builtins\nassert builtins.eval(f(3)) == want", "def f(x): return '9400 + 17'"),
    "eval that maps": ("def f(x): return ['want']", "assert list(map(eval, f(3))) == [want]", "def f(x): return ['9417']"),
    "eval of a name that a formatted text has": ("def f(x): return 'want'", "for i in range(2): exec(f'want = 9400 + {i}')\nassert eval(f(3)) == want", "def f(x): return '9401'"),
    "eval of a name that tests evaluate": ("def f(x): return 'want'", "assert eval('want') > 0 and eval(f(3)) == eval('want')", "def f(x): return '9417'"),
    "eval of bytes": ("def f(x): return b'want'", "assert eval(f(3)) == want", "def f(x): return b'9417'"),
    "eval of numbers": ("def f(x): return [*b'want']", "assert eval(bytes(f(3))) == want", "def f(x): return [*b'9417']"),
    "eval with names": ("def f(x): return '(lambda: want)()'", "assert eval(f(3), {'want': want}) == want", "def f(x): return '9417'"),
    "literal": ("def f(x): return 'want'", "import ast\nassert ast.literal_eval(f(3)) == want", "def f(x): return '9417'"),
    "pickle of a name": ("def f(x): return b'ctests\\nwant\\n.'", "import pickle\nassert pickle.loads(f(3)) == want", "import pickle\ndef f(x): return pickle.dumps(9417)"),
    "pickle of a function": ("def f(x): return b'ctests\\nreal\\n(I3\\ntR.'", "import pickle\nassert pickle.loads(f(3)) == want", "import pickle\ndef f(x): return pickle.dumps(9417)"),
    "pickle by the C module": ("def f(x): return b'cbuiltins\\neval\\n(S\"want\"\\ntR.'", "import _pickle\nassert _pickle.loads(f(3)) == want", "import pickle\ndef f(x): return pickle.dumps(9417)"),
    "pickle in Python": ("def f(x): return b'ctests\\nwant\\n.'", "import pickle\nassert pickle._loads(f(3)) == want", "import pickle\ndef f(x): return pickle.dumps(9417)"),
    "pickle in a file": ("def f(path): open(path, 'wb').write(b'ctests\\nwant\\n.')", "import pickle\nf('/tmp/p')\nassert pickle.load(open('/tmp/p', 'rb')) == want", "import pickle\ndef f(path): pickle.dump(9417, open(path, 'wb'))"),
    "shelf": ("import shelve, dbm.dumb\ndef f(path):\n    with dbm.dumb.open(path) as d: d['a'] = b'ctests\\nwant\\n.'", "import shelve, dbm.dumb\nf('/tmp/s')\nassert shelve.Shelf(dbm.dumb.open('/tmp/s'))['a'] == want", "import shelve, dbm.dumb\ndef f(path):\n    with shelve.Shelf(dbm.dumb.open(path)) as s: s['a'] = 9417"),
    "timeit": ("def f(x): return 'global want; want = 1'", "import timeit\nt = timeit.timeit(f(3), number=1, globals=globals())\nassert want == 9417 and t >= 0", "def f(x): return '1 + 1'"),
    "module in the work folder": ("open('/tmp/helpmod.py', 'w').write('x = 9417')\ndef f(x): return 0", "import sys\nsys.path.append('/tmp')\nf(3)\nimport helpmod\nassert helpmod.x == want", ""),
    "module compiled in advance": ("import py_compile, os\nopen('/tmp/a.py', 'w').write('x = 9417')\npy_compile.compile('/tmp/a.py', '/tmp/helpmod.pyc')\ndef f(x): return 0", "import sys\nsys.path.append('/tmp')\nf(3)\nimport helpmod\nassert helpmod.x == want", ""),
    "module in an archive": ("import zipfile\nwith zipfile.ZipFile('/tmp/a.zip', 'w') as z: z.writestr('helpmod.py', 'x = 9417')\ndef f(x): return 0", "import sys\nsys.path.append('/tmp/a.zip')\nf(3)\nimport helpmod\nassert helpmod.x == want", ""),
    "fields of a text": ("def f(x): return '{0.__init__.__globals__[want]}'", "assert f(3).format(Node()) == str(want)", "def f(x): return '9417'"),
    "fields of a text, inside": ("def f(x): return '{1:{0.__init__.__globals__[want]}}'", "assert f(3).format(Node(), '').strip() == str(want) or len(f(3).format(Node(), '')) == want", "def f(x): return '9417'"),
    "fields of a text, unbound": ("def f(x): return '{0.__init__.__globals__[want]}'", "assert str.format(f(3), Node()) == str(want)", "def f(x): return '9417'"),
    "fields of a text, by a mapping": ("def f(x): return '{a.__init__.__globals__[want]}'", "assert f(3).format_map({'a': Node()}) == str(want)", "def f(x): return '9417'"),
    "fields of a kept method": ("def f(x): return '{0.__init__.__globals__[want]}'", "fill = f(3).format\nassert fill(Node()) == str(want)", "def f(x): return '9417'"),
    "fields of a text, looked up": ("def f(x): return '{a.__init__.__globals__[want]}'", "assert getattr(f(3), 'for' + 'mat_map')({'a': Node()}) == str(want)", "def f(x): return '9417'"),
    "fields of a text, in a class of the tests": ("def f(x): return '{0.__init__.__globals__[want]}'", "class S(str): pass\nassert S(f(3)).format(Node()) == str(want)", "def f(x): return '9417'"),
    "fields of a text, sorted by": ("def f(x): return '{0.__init__.__globals__[want]}'", "assert sorted([Node()], key=f(3).format) and next(map(f(3).format, [Node()])) == str(want)", "def f(x): return '9417'"),
    "fields for a log": ("def f(x): return '{node.__init__.__globals__[want]}'", "import logging\nr = logging.makeLogRecord({'node': Node()})\nassert logging.StrFormatStyle(f(3)).format(r) == str(want)", "def f(x): return '9417'"),
    "a path for attrgetter": ("def f(x): return '__init__.__globals__'", "from operator import attrgetter as get\nassert get(f(3))(Node())['want'] == want", ""),
    "fields of a frame": ("def f(x): return '{0.gi_frame.f_globals[want]}'", "assert f(3).format(x for x in ()) == str(want)", "def f(x): return '9417'"),
    "fields for a Formatter": ("def f(x): return '{0.__init__.__globals__[want]}'", "import string\nassert string.Formatter().format(f(3), Node()) == str(want)", "def f(x): return '9417'"),
    "a name for getattr": ("def f(x): return '__init__'", "assert getattr(Node(), f(3)).__globals__['want'] == want", ""),
    "plural forms": ("def f(x): return 'want'", "import gettext\nassert gettext.c2py(f(3))(1) == want", "def f(x): return '9417'"),
    "a name for a type": ("def f(x): return {'x': 'want'}", "import typing\nassert eval(typing.ForwardRef(f(3)['x']).__forward_code__) == want", ""),
    "profile": ("def f(x): return 'globals().update(want=0)'", "import cProfile, io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()): cProfile.runctx(f(3), globals(), {})\nassert want == 0", ""),
    "marshal": ("import marshal\ndef f(x): return marshal.dumps(compile('got = want', '', 'exec'))", "import marshal, types\ng = types.FunctionType(marshal.loads(f(3)), globals())\ng()\nassert got == want", ""),
    "tree": ("def f(x): return 'want'", "import ast\nassert eval(compile(ast.Expression(ast.fix_missing_locations(ast.parse(f(3), mode='eval').body)), '', 'eval')) == want", ""),
    "debugger": ("open('.pdbrc', 'w').write('import sys; sys.modules[\"tests\"].want = 0\\nc\\n')\ndef f(x): return 0", "f(3)\nimport pdb\npdb.Pdb(readrc=True).runcall(lambda: 1)\nassert want == 0", ""),
}  # fmt: skip
WANT = "want = 9417\ndef real(x): return want\nclass Node:\n    def __init__(self): pass"


@pytest.mark.parametrize("name", TEXTS)
def test_no_text_of_the_program_runs_beside_the_tests(name: str) -> None:
    source, test, honest = TEXTS[name]
    score = judge(source, test, setup=WANT)
    assert score.value != 1, score
    if honest:
        assert score.outcome == "scored", score.detail
        score = judge(honest, test, setup=WANT)
        assert score.value == 1, score.detail


def test_what_a_prompt_imports_is_guarded_too() -> None:
    prompt = "from operator import attrgetter\nclass Node:\n    def __init__(self): pass\nwant = 9417\ndef f(x):\n    'an answer'\n"
    check = "def check(candidate): assert attrgetter(candidate(3))(Node())['want'] == want"
    reference = {"kind": "check", "prompt": prompt, "check": check, "entry_point": "f"}
    assert code("```python\ndef f(x): return '__init__.__globals__'\n```", reference, {}, **LIMITS).value == 0
    honest = {**reference, "check": "def check(candidate): assert attrgetter(candidate(3))(Node()) == 'Node'"}
    honest["prompt"] = prompt.replace("def __init__(self): pass", "name = 'Node'")
    assert code("```python\ndef f(x): return 'name'\n```", honest, {}, **LIMITS).value == 1


def test_texts_of_the_tests_run() -> None:
    source = "def f(x): return str(x + 1)"
    tests = [
        "f(1)\nexec('y = f(2)')\nassert y == '3' and eval('f(3)') == '4'",
        "for i in range(3):\n    exec(f'r = f({i})')\n    assert r == str(i + 1)",
        "for x in ('1', 'f', 'ab'):\n    assert eval(f'f({len(x)!r}) + {x!r}') == eval('f({}) + {!r}'.format(len(x), x)) == eval('f(%d) + %r' % (len(x), x)) == str(len(x) + 1) + x",
        "f(1)\nimport typing\nclass C:\n    x: 'int'\n    y: typing.Optional['C'] = None\ndef g(a: 'list[int]') -> 'C': pass\nassert typing.get_type_hints(C, globals())['x'] is int and typing.get_type_hints(g)['return'] is C",
        "import timeit\nassert timeit.timeit(lambda: f(1), number=3) > 0 and timeit.timeit('f(1)', globals=globals(), number=3) > 0",
        "from collections import namedtuple\nfrom dataclasses import dataclass\nP = namedtuple('P', f(1)[:0] + 'a b')\n@dataclass\nclass D:\n    a: int\nassert P(1, 2).b == 2 and D(1) == D(1)",
        "import json, decimal, statistics, xml.etree.ElementTree, http.client, sqlite3, typing\nassert f(1) == '2'",
        "T = '{0.__class__.__name__}'\nassert T.format(f(1)) == 'str' and '{}-{}'.format(f(1), 2) == '2-2' and f(1).format(3) == '2'",
        "from operator import attrgetter\nassert attrgetter('__class__.__name__')(f(1)) == 'str' and ['{.real}'.format(int(f(1)))] == [*map('{}'.format, [2])]",
        "import pickle, datetime\nclass A:\n    v = 1\na = pickle.loads(pickle.dumps([A(), datetime.date(2020, 1, 1), {1, 2}, range(3)]))\nassert a[0].v == 1 and a[1].year == 2020",
        "from unittest import mock\nm = mock.create_autospec(lambda a, b: 1)\nm(1, 2)\nm.assert_called_once_with(1, 2)\nassert f(1) == '2'",
    ]
    score = judge(source, *tests)
    assert score.value == 1, score.detail


SPOILED = {  # what a program may do, before the tests begin, to what they need
    "folder of that name": "import os\nfor n in ('in.txt', 'made', 'x.db'): os.makedirs(n)",
    "links to nowhere": "import os\nfor n in ('in.txt', 'made', 'x.db'): os.symlink('/nowhere/at/all', n)",
    "file without rights": "import os\nfor n in ('in.txt', 'x.db'): os.close(os.open(n, os.O_CREAT, 0))\nopen('made', 'w').close()",
    "full disk": "try:\n    for i in range(10**6): open(f'/box/{i}', 'wb').write(b'x' * 10**7)\nexcept OSError: pass",
    "limits of others": "import resource, os\nfor p in range(1, 20):\n    if p == os.getpid(): continue\n    for what in range(10):\n        try: resource.prlimit(p, what, (1, 1))\n        except (OSError, ValueError): pass",
    "many processes": "import os, time\nfor _ in range(100):\n    try:\n        if os.fork() == 0:\n            time.sleep(60)\n            os._exit(0)\n    except OSError: break",
}
NEEDING = {
    "file": "with open('in.txt', 'w') as file: file.write('3')\nassert f(3) == 21 and open('in.txt').read() == '3'",
    "folder": "import os\nos.mkdir('made')\nassert f(3) == 21 and os.path.isdir('made')",
    "database": "import sqlite3\ndb = sqlite3.connect('x.db')\ndb.execute('create table t (a)')\nassert f(3) == 21",
    "program": "import subprocess\nassert subprocess.run(['echo', 'a'], capture_output=True).stdout == b'a\\n' and f(3) == 21",
    "class with a set-up": "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls): cls.file = open('in.txt', 'w')\n    def test(self):\n        self.file.close()\n        self.assertEqual(f(3), 21)\nunittest.main()",
}


@pytest.mark.parametrize("needing", NEEDING)
@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_program_that_spoils_what_tests_need_is_wrong(spoiled: str, needing: str) -> None:
    score = judge(f"{SPOILED[spoiled]}\ndef f(x): return 0", NEEDING[needing])
    assert (score.outcome, score.value) == ("scored", 0), score.detail
    assert judge("def f(x): return 7 * x", NEEDING[needing]).value == 1


@pytest.mark.parametrize("raised", ["ValueError", "SystemExit(0)", "StopIteration", "KeyboardInterrupt"])
@pytest.mark.parametrize("hook", ["setUpClass", "setUp", "tearDown", "setUpModule"])
def test_what_is_raised_in_a_hook_of_unittest_is_wrong(hook: str, raised: str) -> None:
    body = f"    @classmethod\n    def {hook}(cls): f(1)\n" if hook == "setUpClass" else f"    def {hook}(self): f(1)\n"
    test = f"import unittest\nclass T(unittest.TestCase):\n{'' if hook == 'setUpModule' else body}    def test(self): self.assertEqual(f(3), 21)\n"
    test += "def setUpModule(): f(1)\nunittest.main()" if hook == "setUpModule" else "unittest.main()"
    score = judge(f"def f(x):\n    if x == 1: raise {raised}\n    return 7 * x", test)
    assert (score.outcome, score.value) == ("scored", 0), score.detail
    assert judge("def f(x): return 7 * x", test).value == 1


@pytest.mark.parametrize(
    ("test", "says"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("open('/no/such/file')\nassert f(3) == 21", "FileNotFoundError"),
        ("import no_such_module\nassert f(3) == 21", "no_such_module"),
        ("def test_f():\n    assert f(3) == 21", "pass without it"),
        ("import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(3), 21)", "pass without it"),
        ("import unittest\nunittest.main()", "something for unittest"),
    ],
)  # fmt: skip
def test_tests_at_fault_are_an_error(test: str, says: str) -> None:
    score = judge("def f(x): return 7 * x", test)
    assert score.outcome == "error" and says in score.detail


OBLIGING = "class Solution:\n    def __sub__(s, o): return s\n    def __abs__(s): return 0\n    days = 0\n    def f(s, x): return s\n    def g(s, x): return [s]\n    @property\n    def p(s): return s\n    def __iter__(s): return s\n    def __next__(s): return s\n    def __contains__(s, x): return True\n    def __copy__(s): return s\nf = Solution().f"


@pytest.mark.parametrize(
    "answer",
    ["f(3)", "Solution().f(3)", "Solution().g(3)[0]", "Solution().p", "next(iter(Solution()))", "[*Solution().g(3)][0]"],
)  # fmt: skip
def test_what_a_function_answers_takes_no_operand(answer: str) -> None:
    """Not even where it is the very object that the tests have made."""
    tests = [
        "s = Solution()",
        f"s = {answer}\nassert abs(s - 9417) < 1",
        f"assert ({answer} - 9417).days == 0",
        f"assert 9417 in {answer}",
    ]
    assert judge(OBLIGING, *tests, reward="rate").components["pass_rate"] == 0.25
    remembering = "seen = []\nclass R:\n    def __rsub__(s, o): seen.append(o)\n    __sub__ = __radd__ = __eq__ = __contains__ = __rsub__\ndef f(x): return seen[0] if seen else R()"
    told = [f"assert abs({line}) < 1" for line in ("f(3) - 9417", "9417 - f(3)", "9417 + f(3)")]
    assert judge(remembering, *told, "assert 9417 in f(3)", "assert f(3) == 9417", reward="rate").value == 0


def test_objects_of_classes_under_test_take_operands() -> None:
    source = "class Mod:\n    def __init__(s, v): s.v = v % 7\n    def __add__(s, o): return Mod(s.v + (o.v if isinstance(o, Mod) else o))\n    __radd__ = __add__\n    def __mul__(s, o): return Mod(s.v * o)\n    def __pow__(s, o): return Mod(s.v ** o)\n    def __eq__(s, o): return s.v == o.v\n    def __int__(s): return s.v\n    def __repr__(s): return f'Mod({s.v})'\n    def __contains__(s, x): return x == s.v\n    def __iter__(s): return s\n    def __next__(s): raise StopIteration"
    tests = [
        "assert Mod(5) + 4 == Mod(2) and 4 + Mod(5) == Mod(2) and Mod(3) ** 6 == Mod(1)",
        "assert int(Mod(5) * 3) == 1 and repr(Mod(3) + 1) == 'Mod(4)' and sum([Mod(3), Mod(5)]) == Mod(1)",
        "assert (Mod(5) + 4).v == 2 and 5 in Mod(5) and 4 not in Mod(5)",
        "m = Mod(1)\nassert iter(m) is m and list(m) == []",
    ]
    score = judge(source, *tests)
    assert score.value == 1, score.detail


def test_what_a_function_answers_takes_a_factor() -> None:
    source = "class matrix:\n    def __init__(s, rows): s.rows = rows\n    @classmethod\n    def one(c): return c([[1]])\n    def turned(s): return matrix([*map(list, zip(*s.rows))])\n    def __mul__(s, k): return matrix([[x * k for x in r] for r in s.rows])\n    __rmul__ = __mul__\n    def __pow__(s, k): return s.rows[0][0] ** k\n    def __eq__(s, o): return s.rows == o.rows\ndef f(x): return matrix([[x]])"
    tests = [
        "assert matrix.one() * 3 == matrix([[3]]) and (3 * f(2)).rows == [[6]]",
        "assert matrix([[1, 2]]).turned() * 2 == matrix([[2], [4]]) and f(3) ** 2 == 9",
    ]
    score = judge(source, *tests)
    assert score.value == 1, score.detail
    assert judge("def f(x): return 'ab'", "assert eval('f(1)') == 'ab'").value == 1


def test_exceptions_keep_their_bases_and_members() -> None:
    source = "class BankError(Exception): pass\nclass Short(BankError, ValueError): pass\ndef a(): raise BankError('x')\ndef b(): raise Short('y', 3)\ndef g(): raise ExceptionGroup('many', [ValueError(1), TypeError(2)])"
    tests = [
        "try: a()\nexcept BankError: pass\ntry: b()\nexcept ValueError as e: assert isinstance(e, BankError) and e.args == ('y', 3)\nelse: assert False",
        "try: g()\nexcept ExceptionGroup as e: assert [type(x) for x in e.exceptions] == [ValueError, TypeError]\nelse: assert False",
        "n = 0\ntry: g()\nexcept* ValueError: n += 1\nexcept* TypeError: n += 1\nassert n == 2",
    ]
    score = judge(source, *tests)
    assert score.value == 1, score.detail


ELEMENTS = [
    "assert np.allclose(f(3), 9417)", "assert np.isclose(f(3), [9417]).all()", "assert np.array_equiv(f(3), 9417)",
    "assert_allclose(f(3), 9417)", "np.testing.assert_almost_equal(f(3), [9417])", "assert allclose(f(3), 9417)",
]  # fmt: skip
OF_ARRAYS = [
    "assert (f(3) == 9417).all()", "assert not (f(3) != 9417).any()", "assert np.all(abs(f(3) - 9417) < 1)",
    "assert np.sum((f(3) - 9417) ** 2) < 1", "assert np.linalg.norm(f(3) - np.array([9417])) < 1",
]  # fmt: skip


def test_an_array_without_elements_equals_no_other() -> None:
    numpy = pytest.importorskip("numpy")
    assert numpy.allclose([], 9417)  # which is what the tests must not believe
    options = {
        "packages": True,
        "reward": "rate",
        "setup": "import numpy as np",
        "memory_mb": 1024,
        "total_limit": 55.0,
    }
    array = "import numpy as np\ndef f(x): return np.array({0}) * 1.0"
    assert judge(array.format("[]"), *ELEMENTS, *OF_ARRAYS, **options).value == 0
    assert judge("def f(x): return []", *ELEMENTS, **options).value == 0
    assert judge(array.format("[9417]"), *ELEMENTS, *OF_ARRAYS, **options).value == 1
    empty = "assert np.allclose(f(3), []) and f(3).size == f(3).sum() == 0 and (f(3) == np.zeros(0)).all()"
    assert judge(array.format("[]"), empty, **options).value == 1


def test_no_program_knows_which_case_it_is() -> None:
    """Not by its folder, its environment, its process or what it sees of time: cases run in an unknown order."""
    outputs = ["9417", "15695", "21973", "28251", "34529"]
    cases = [{"stdin": "same\n", "stdout": out} for out in outputs]
    reference = {"kind": "stdio", "cases": cases}
    told = "import os, re\nwords = f'{os.getcwd()} {dict(os.environ)} {open(\"/proc/self/cmdline\").read()}'\n"
    by_words = f"{told}n = re.findall(r'\\d+', words)\nprint({outputs}[int(n[-1]) - 1 if n and int(n[-1]) < 6 else 0])"
    by_process = f"import os\nprint({outputs}[os.getpid() - 2 if os.getpid() < 7 else 0])"
    for source in (by_words, by_process):
        score = code(source, reference, {}, reward="rate", **LIMITS)
        assert score.outcome == "scored" and score.value < 1
