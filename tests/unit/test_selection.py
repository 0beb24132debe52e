"""Which cases of a test `make test` runs, and which tests belong to what was changed."""

import re
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from changed import chosen_for
from selection import _each_value_once, _some

TESTS = Path(__file__).parents[1]


def cases(*sizes: int) -> list[Any]:
    """Of a test with so many values of each parameter."""
    found = []
    for numbers in product(*map(range, sizes)):
        indices = {f"parameter {place}": number for place, number in enumerate(numbers)}
        found.append(SimpleNamespace(callspec=SimpleNamespace(indices=indices), name="test", numbers=numbers))
    return [_Case(case) for case in found]


class _Case:
    def __init__(self, values: SimpleNamespace) -> None:
        self.__dict__.update(vars(values))


@pytest.mark.parametrize(("sizes", "count"), [((5,), 5), ((3, 3), 3), ((4, 2, 3), 4), ((1, 1), 1)])
def test_each_value_of_each_parameter_appears(sizes: tuple[int, ...], count: int) -> None:
    found = _each_value_once(cases(*sizes))
    assert len(found) == count
    assert all({case.numbers[place] for case in found} == set(range(size)) for place, size in enumerate(sizes))


def test_the_values_of_a_short_parameter_take_turns() -> None:
    found = _each_value_once(cases(9, 2))
    assert len(found) == 9 and sorted(Counter(case.numbers[1] for case in found).values()) == [4, 5]


def test_a_test_without_parameters_is_one_case() -> None:
    (case,) = [_Case(SimpleNamespace(name="test"))]
    assert _each_value_once([case]) == [case]


@pytest.mark.parametrize("keep", [0, 1, 2, 5, 9])
def test_so_many_stay_and_always_the_same(keep: int) -> None:
    many = cases(7)
    assert len(_some(many, keep)) == min(keep, 7) and _some(many, keep) == _some(many, keep)


@pytest.mark.thorough
def test_changed_rooms_and_their_importers() -> None:
    found = {str(path) for path in chosen_for([Path("kitae/store/journal.py"), Path("tests/unit/data/test_tasks.py")])}
    assert {"tests/unit/store", "tests/unit/rl", "tests/unit/data/test_tasks.py"} <= found
    assert not found & {"tests/unit", "tests/unit/data", "tests/unit/kernels"}
    assert chosen_for([Path("README.md")]) == []


def test_the_tests_that_a_helper_serves() -> None:
    assert chosen_for([Path("tests/integration/faults.py")]) == [Path("tests/integration/test_faults.py")]
    plans = {path.name for path in chosen_for([Path("tests/integration/fault_plans.py")])}
    assert plans == {"test_faults.py", "test_damage.py"}, "by others"
    assert chosen_for([Path("tests/unit/workers/conftest.py")]) == [Path("tests/unit/workers")]


def test_each_file_can_be_run_alone(pytestconfig: pytest.Config) -> None:
    """What it imports from other tests lies beside it, above it with a conftest, or where pytest is told to look."""
    told = {pytestconfig.rootpath / name for name in pytestconfig.getini("pythonpath")}
    homes: dict[str, set[Path]] = {}
    for path in TESTS.rglob("*.py"):
        homes.setdefault(path.stem, set()).add(path.parent)
    lost = []
    for path in [*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")]:
        above = {parent for parent in path.parents if (parent / "conftest.py").exists()}
        for name in re.findall(r"^ *(?:from|import) (\w+)\b", path.read_text(), re.MULTILINE):
            if name in homes and "gpu" not in path.parts and not homes[name] & {path.parent, *above, *told}:
                lost.append(f"{path.relative_to(TESTS)} imports {name}")
    assert not lost, "\n".join(lost)
