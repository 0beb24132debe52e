"""The verifier of programs: extracts the code from a response and runs it against tests, in a sandbox.

References, as a mapping or as JSON text, with or without `{"tests": …}` around them:

    {"kind": "asserts", "asserts": ["assert f(1) == 2"], "setup": "import math"}
    {"kind": "stdio", "cases": [{"stdin": "1 2\n", "stdout": "3\n"}]}
    {"kind": "check", "prompt": "def f(x):…", "check": "def check(candidate): …", "entry_point": "f"}
    {"kind": "calls", "function": "f", "cases": [{"arguments": [1, 2], "result": 3}]}

or in the layout of a known data set (`layouts`).

How a verdict is made. stdio: the expected output never enters the sandbox; it is compared here. asserts and check: the
tests run in a process of their own that the candidate cannot read, signal or write to, and reach the candidate only by
requests for plain data (`kitae.sandbox.inside.checker`). So printing, exiting, patching built-ins or the test
framework, objects that equal everything and forged reports have no effect.

Which side sees what. The code under test sees the prompt of a check, and of a setup its imports and types (see
`visible_setup`), but no function, value or test. The tests take from the code under test only names that they use and
that neither the setup, the prompt nor Python defines; `np.allclose` or `isclose` without an import are taken from the
libraries (see `names_of` in `analysis`).

What remains possible: guessing (`assert is_prime(7)` passes a function that always returns True), and lying to a test
that hands the expected value to a function or an object of the candidate (`assert f().equals(3)`). What the separation
costs: an instance of a class of the candidate never equals a value that is not one; arguments are copies, and lists,
dicts, sets and instances of the setup's classes in them are updated after the statement. The docstring of the checker
lists what of a class or function reaches the tests.

Tests that cannot import what they need, raise before they use the code at all and without it too, or pass without using
it, are an error and not a 0: the data or the machine is at fault. So are tests that run text of the response as a
program, and those that leave the verdict to a function which nobody defines (`refusal` in `analysis`). Not detected:
another name that neither the tests nor the response define, which counts against the
response.
"""
