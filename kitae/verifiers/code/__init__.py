"""The verifier of programs: takes the code out of a response and runs it against tests, in a sandbox.

References, as a mapping or as JSON text, with or without `{"tests": …}` around them:

    {"kind": "asserts", "asserts": ["assert f(1) == 2"], "setup": "import math"}
    {"kind": "stdio", "cases": [{"stdin": "1 2\n", "stdout": "3\n"}]}
    {"kind": "check", "prompt": "def f(x):…", "check": "def check(candidate): …", "entry_point": "f"}

How a verdict is made. stdio: the expected output never enters the sandbox; it is compared here. asserts and check: the
tests run in a process of their own that the candidate cannot read, signal or write to, and reach the candidate only by
asking it for plain data (`kitae.sandbox.inside.checker`). So printing, exiting, patching built-ins or the test
framework, objects that equal everything and forged reports all come to nothing.

Who gets what. The code under test sees the prompt of a check; of a setup its imports, its types (`visible_setup` says
which) and nothing else: no function, no value, no test. The tests take from the code under test only what they use and
nobody else defines: not what the setup, the prompt or Python defines, nor `np.allclose` or `isclose` where they forgot
to import them (`names_of`, which is in `analysis` too).

What remains possible: to guess (`assert is_prime(7)` passes a function that always says True), and to be told: a test
that hands the expected value to a function or an object of the candidate's (`assert f().equals(3)`) can be lied to.
What the separation costs: an instance of a class of the candidate's never equals a value that is not one; arguments
are copies, and lists, dicts, sets and instances of the setup's classes in them are updated after the statement.
The checker says what of a class or function reaches the tests and what does not.

Tests that cannot import what they need, or raise before they use the code at all, are an error and not a 0: the data or
the machine is at fault. Not seen: a name that neither the tests nor the response define, which counts against it.
"""
