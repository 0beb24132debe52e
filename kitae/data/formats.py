"""How a row of a known data set becomes a question, a reference and, where it has one, a response that must score 1.

    format        columns                                                         verifier
    math          problem, answer (or a solution with a \\boxed answer)             math
    svamp         Body, Question, Answer                                          math
    mbpp          text or prompt, code, test_list, test_setup_code or test_imports code
    humaneval     prompt, test, entry_point, canonical_solution                   code
    apps, taco    question, input_output, starter_code, solutions                 code
    livecodebench question_content, starter_code, test cases, metadata            code
    evalplus      prompt, entry_point, canonical_solution, base_input, plus_input code
    ifeval        prompt, instruction_id_list, kwargs                             instructions
    trl           prompt, and columns that reward functions read                  your own
    verl          prompt, data_source, reward_model with ground_truth, extra_info verl

`data.format = "mbpp"` names one; `data.format = "file.py:function"` is your own: a function from the row, a mapping, to
an `Exercise`, or to a mapping with its keys.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kitae.data.boxes import last_boxed
from kitae.data.data_files import explained
from kitae.errors import DataError
from kitae.plugins import is_plugin, load_function, nearest


class Exercise(NamedTuple):
    """`Exercise("What is 6 · 7?", "42")`; the question may be a list of chat messages.

    context: the columns that verifiers get beside the reference, where they are not those of the row.
    """

    question: Any
    reference: Any
    gold: str | None = None
    context: Mapping[str, Any] | None = None


Reader = Callable[[Mapping[str, Any]], Any]


class Format(NamedTuple):
    """How to read a row, and the verifier that its references are made for."""

    read: Reader
    verifier: str


def find_reader(name: str) -> Reader:
    """How the format of this name reads a row; a user's own function is loaded here."""
    if name in FORMATS:
        return FORMATS[name].read
    if is_plugin(name):
        return load_function(name, "format", ("row",), DataError)
    raise DataError(f"data.format must be one of {', '.join(FORMATS)} or file.py:function{nearest(name, FORMATS)}")


def read_row(reader: Reader, row: Mapping[str, Any]) -> Exercise:
    """What a format makes of a row; a `DataError` says what is wrong with the row, or with a user's function."""
    with explained(row):
        made = reader(row)
        return made if isinstance(made, Exercise) else Exercise(**made)


def math(row: Mapping[str, Any]) -> Exercise:
    problem, answer = row["problem"], row.get("answer")
    if answer is None and "solution" in row:
        answer = last_boxed(row["solution"])
    if answer is None or not str(answer).strip():
        raise DataError(r"a row of MATH must have an answer, or a solution with its answer in a \boxed, got neither")
    return Exercise(problem, str(answer))


def svamp(row: Mapping[str, Any]) -> Exercise:
    """Some stories end without a full stop; answers are whole numbers, which some copies write as 145.0."""
    body, answer = str(row["Body"]).strip(), str(row["Answer"]).strip().removesuffix(".0")
    if not answer:
        raise DataError("a row of SVAMP must have an answer, got none")
    return Exercise(f"{body}{'' if body.endswith(('.', '!', '?')) else '.'} {str(row['Question']).strip()}", answer)


def mbpp(row: Mapping[str, Any]) -> Exercise:
    """The prompt shows the tests, as the data set's authors do: they name the function."""
    tests = list(row["test_list"])
    setup = "\n".join([row.get("test_setup_code") or "", *(row.get("test_imports") or ())]).strip()
    task = row["text"] if "text" in row else row["prompt"]
    question = f"{task} Your code should pass these tests:\n\n" + "\n".join(tests)
    return Exercise(question, {"tests": {"kind": "asserts", "asserts": tests, "setup": setup}}, row.get("code"))


def humaneval(row: Mapping[str, Any]) -> Exercise:
    tests = {"kind": "check", "prompt": row["prompt"], "check": row["test"], "entry_point": row["entry_point"]}
    question = f"Complete this function:\n\n```python\n{row['prompt'].strip()}\n```"
    return Exercise(question, {"tests": tests}, row.get("canonical_solution"))


def apps(row: Mapping[str, Any]) -> Exercise:
    """Solutions are a list, or its JSON; in the files some problems have none."""
    found = row.get("solutions") or "[]"
    solutions = json.loads(found) if isinstance(found, str) else found
    gold = f"```python\n{solutions[0]}\n```" if solutions else None
    return Exercise(_task(row["question"], row.get("starter_code")), {"tests": row["input_output"]}, gold)


def livecodebench(row: Mapping[str, Any]) -> Exercise:
    tests = {name: row.get(name) for name in ("public_test_cases", "private_test_cases", "metadata")}
    return Exercise(_task(row["question_content"], row.get("starter_code")), {"tests": tests})


def evalplus(row: Mapping[str, Any]) -> Exercise:
    names = ("prompt", "entry_point", "canonical_solution", "base_input", "plus_input", "atol")
    question = f"Complete this function:\n\n```python\n{row['prompt'].strip()}\n```"
    return Exercise(question, {"tests": {name: row.get(name) for name in names}}, row["canonical_solution"])


def _task(question: str, starter: str | None) -> str:
    if starter and starter.strip():
        return f"{question.strip()}\n\nBegin with this code:\n\n```python\n{starter.rstrip()}\n```"
    return f"{question.strip()}\n\nThe program reads from standard input and prints its answer."


_REFERENCES = ("solution", "answer", "ground_truth", "label", "target")


def trl(row: Mapping[str, Any]) -> Exercise:
    """Reward functions get every column; a verifier of Kitae's, the one that is called like a reference."""
    reference = next((row[key] for key in _REFERENCES if row.get(key) is not None), "")
    return Exercise(row["prompt"], reference)


def verl(row: Mapping[str, Any]) -> Exercise:
    return Exercise(row["prompt"], row["reward_model"]["ground_truth"])


def ifeval(row: Mapping[str, Any]) -> Exercise:
    names, arguments = row["instruction_id_list"], row["kwargs"]
    if len(names) != len(arguments):
        raise DataError(f"instruction_id_list and kwargs must be of one length, got {len(names)} and {len(arguments)}")
    instructions = [
        {"id": name, "kwargs": {k: v for k, v in (given or {}).items() if v is not None}}
        for name, given in zip(names, arguments, strict=True)
    ]
    return Exercise(row["prompt"], {"instructions": instructions})


FORMATS = {
    "math": Format(math, "math"),
    "svamp": Format(svamp, "math"),
    "mbpp": Format(mbpp, "code"),
    "humaneval": Format(humaneval, "code"),
    "apps": Format(apps, "code"),
    "taco": Format(apps, "code"),
    "livecodebench": Format(livecodebench, "code"),
    "evalplus": Format(evalplus, "code"),
    "ifeval": Format(ifeval, "instructions"),
    "trl": Format(trl, "exact"),
    "verl": Format(verl, "verl"),
}
