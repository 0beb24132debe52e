"""Which tests are run: all, those that prove the product in minutes, or the others.

    pytest                  every test but those marked `slow` or `servers`
    pytest --part quick     one or two cases of each behaviour and a few whole runs: `make test`
    pytest --part rest      what `quick` leaves out: `make test-all` runs it after `make test`

What `quick` leaves out:

- Of a test with several independent parameters, the cases beyond a set in which each value appears at least once.
- Tests marked `thorough`: they take long, and other tests cover the behaviour. With `thorough(keep=2)` two cases of
  that set stay.
- Tests of whole runs (`tests/integration`, `tests/browser`) without the mark `sentinel`; with it, one case stays, and
  with `sentinel(keep=2)` two.
- Tests that a file imports from another file to run them again under its own conditions, likewise.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

import pytest

WHOLE_RUNS = tuple(Path(__file__).parent / name for name in ("integration", "browser"))


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "quick: what proves the product in minutes; rest: everything else"
    parser.addoption("--part", choices=("all", "quick", "rest"), default="all", help=help)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (part := config.getoption("part")) == "all":
        return
    quick = {item.nodeid for item in chosen(items)}
    left_out = [item for item in items if (item.nodeid in quick) != (part == "quick")]
    items[:] = [item for item in items if (item.nodeid in quick) == (part == "quick")]
    config.hook.pytest_deselected(items=left_out)


def chosen(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    cases: dict[tuple[pytest.Item | pytest.Collector | None, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.parent, getattr(item, "originalname", item.name)].append(item)
    return [item for group in cases.values() for item in _chosen_cases(group)]


def _chosen_cases(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Of the cases of one test function."""
    first = cases[0]
    sentinel, thorough = map(first.get_closest_marker, ("sentinel", "thorough"))
    covering = _each_value_once(cases)
    if _needs_sentinel(first):
        return _some(covering, sentinel.kwargs.get("keep", 1) if sentinel else 0)
    return _some(covering, thorough.kwargs.get("keep", 0)) if thorough else covering


def _some(cases: list[pytest.Item], keep: int) -> list[pytest.Item]:
    """So many, in steps of the same length. Where they begin depends on the name of the test, so that of the engines,
    say, that many tests have as their parameter each is taken by some test."""
    name = getattr(cases[0], "originalname", cases[0].name)
    start = crc32(name.encode())
    places = {(start + number * len(cases) // keep) % len(cases) for number in range(keep)}
    return [case for place, case in enumerate(cases) if place in places]


def _needs_sentinel(case: pytest.Item) -> bool:
    if any(case.path.is_relative_to(folder) for folder in WHOLE_RUNS):
        return True
    return isinstance(case, pytest.Function) and case.function.__module__ != case.module.__name__


def _each_value_once(cases: list[pytest.Item]) -> list[pytest.Item]:
    """A small set of cases in which each value of each parameter appears; all cases, where there is one parameter.

    Parameters that one decorator sets together count as one. Where one has more values than another, the values of the
    other take turns.
    """
    by_values = {_values(case): case for case in cases}
    missing = set().union(*by_values)
    numbers: dict[str, list[int]] = defaultdict(list)
    for name, number in sorted(missing):
        numbers[name].append(number)
    if len(numbers) < 2:
        return cases
    turns = range(max(map(len, numbers.values())))
    wanted = (frozenset((name, each[turn % len(each)]) for name, each in numbers.items()) for turn in turns)
    found = {values for values in wanted if values in by_values}
    missing -= frozenset().union(*found)
    while missing:  # not every value meets every other
        best = max(by_values, key=lambda values: len(values & missing))
        found.add(best)
        missing -= best
    return [case for values, case in by_values.items() if values in found]


def _values(case: pytest.Item) -> frozenset[tuple[str, int]]:
    """Of each parameter, the number of its value."""
    callspec = getattr(case, "callspec", None)
    return frozenset() if callspec is None else frozenset(callspec.indices.items())
