"""The run folder: numbered, locked, and tied to the settings it was started with."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kitae.config.recipe import parse_config
from kitae.config.root import RLConfig
from kitae.errors import ConfigChangedError, ConfigError, StoreError
from kitae.store.run_folder import Metrics, RunStore, read_config


def config_in(folder: Path, **training: Any) -> RLConfig:
    run = {"dir": str(folder), "name": "test"}
    return parse_config({"run": run, "data": {"task": "reverse"}, "training": training, "checkpoint": {"keep": 7}})


@pytest.fixture
def config(tmp_path: Path) -> RLConfig:
    return config_in(tmp_path / "runs")


def started(config: RLConfig) -> Path:
    """A closed run folder whose journal knows its settings, as after a first step."""
    store = RunStore.create(config)
    asyncio.run(store.journal.begin(config.to_json(), []))
    store.close()
    return store.folder


def edit(folder: Path, section: str, key: str, value: Any) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values[section][key] = value
    path.write_text(json.dumps(values))


def test_folders_are_numbered(config: RLConfig) -> None:
    stores = [RunStore.create(config) for _ in range(3)]
    assert [s.folder.name for s in stores] == ["test-001", "test-002", "test-003"]
    for store in stores:
        store.close()
    assert read_config(stores[0].folder) == config
    assert stores[0].checkpoints.keep == 7


def test_a_number_that_is_taken_is_skipped(config: RLConfig) -> None:
    parent = Path(config.run.dir)
    (parent / "test-002").mkdir(parents=True)
    (parent / "test-003").write_text("a file in the way")
    names = []
    for _ in range(2):
        store = RunStore.create(config)
        names.append(store.folder.name)
        store.close()
    assert names == ["test-001", "test-004"]


def test_a_place_where_no_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot make the run folder .*file/test-001"):
        RunStore.create(config_in(tmp_path / "file"))


def test_open_continues_what_was_written(config: RLConfig) -> None:
    folder = started(config)
    store = RunStore.open(folder)
    assert store.config == config
    asyncio.run(store.journal.add_event("again"))
    assert [kind for _, kind, _ in store.journal.events()] == ["again"]
    store.close()


def test_a_second_opening_is_refused_until_the_first_is_closed(config: RLConfig) -> None:
    store = RunStore.create(config)
    with pytest.raises(StoreError, match=r"another process is working in .*test-001"):
        RunStore.open(store.folder)
    store.close()
    RunStore.open(store.folder).close()


def test_the_lock_is_of_the_process_and_goes_with_it(config: RLConfig) -> None:
    folder = started(config)
    code = (
        "import sys; from pathlib import Path; from kitae.store.run_folder import RunStore\n"
        "store = RunStore.open(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(StoreError, match="another process is working"):
            RunStore.open(folder)
        other.kill()
        other.wait()
        RunStore.open(folder).close()


def test_changed_settings_are_refused_by_key_and_both_values(config: RLConfig) -> None:
    folder = started(config)
    edit(folder, "training", "group_size", 16)
    edit(folder, "training", "lr", 0.5)
    edit(folder, "data", "params", {"count": 4})
    with pytest.raises(ConfigChangedError) as caught:
        RunStore.open(folder)
    lines = str(caught.value).splitlines()
    assert lines[1:-1] == ["  training.group_size: was 8, is 16", "  data.params: was {}, is {'count': 4}"]
    edit(folder, "training", "group_size", 8)
    edit(folder, "data", "params", {})
    RunStore.open(folder).close()  # the refusal has let go of the lock, and the old values are welcome


def test_some_settings_may_change_and_are_recorded_when_the_run_goes_on(config: RLConfig) -> None:
    folder = started(config)
    edit(folder, "training", "lr", 0.5)  # by hand or on the command line
    store = RunStore.open(folder, ["training.steps=7", "engine.max_batch=3"])
    assert set(store.changes) == {"training.lr", "training.steps", "engine.max_batch"}
    assert read_config(folder).training.steps == config.training.steps, "nothing is written before the run begins"
    asyncio.run(store.begin(0))
    recorded = [detail for _, kind, detail in store.journal.events() if kind == "changed"]
    assert "after step 0: training.lr: was 1e-05, is 0.5" in recorded and len(recorded) == 3
    store.close()
    again = RunStore.open(folder)
    assert again.changes == {} and again.config.training.steps == 7 and again.config.engine.max_batch == 3
    again.close()


def test_settings_that_are_wrong_now_are_refused_and_let_go(config: RLConfig) -> None:
    folder = started(config)
    edit(folder, "training", "lr", -1)
    with pytest.raises(ConfigError, match=r"training\.lr"):
        RunStore.open(folder)
    edit(folder, "training", "lr", 1e-05)
    RunStore.open(folder).close()


def test_a_journal_that_cannot_be_opened_lets_go_of_the_lock(config: RLConfig) -> None:
    folder = started(config)
    good = (folder / "journal.sqlite").read_bytes()
    for name in ("journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm"):
        (folder / name).unlink(missing_ok=True)
    (folder / "journal.sqlite").write_bytes(b"garbage" * 1000)
    with pytest.raises(StoreError, match="not a database") as caught:
        RunStore.open(folder)
    (folder / "journal.sqlite").write_bytes(good)
    RunStore.open(folder).close()  # while the exception, and what it refers to, is still alive
    assert caught.value is not None


def test_a_run_started_by_other_settings_names_is_refused_and_let_go(config: RLConfig) -> None:
    """The journal's copy may be of another version of Kitae, with a key that is gone."""
    folder = started(config)
    store = RunStore.open(folder)
    old = json.loads(config.to_json())
    old["training"]["gone"] = 1
    asyncio.run(store.journal.begin(json.dumps(old), []))
    store.close()
    for _ in range(2):  # the second time it is still the settings and not the lock
        with pytest.raises(ConfigError, match=r"training\.gone") as caught:
            RunStore.open(folder)
    assert caught.value is not None


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is not a run folder: it has no config.json"), ("{", "is not valid JSON"), ("[]", "sections")],
)
def test_what_is_no_run_folder(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises((StoreError, ConfigError), match=message):
        RunStore.open(tmp_path)
    assert not (tmp_path / "journal.sqlite").exists()


# Metrics.


@pytest.fixture
def metrics(tmp_path: Path) -> Metrics:
    return Metrics(tmp_path / "metrics.jsonl")


def row(step: int, kind: str = "step", **values: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, **values}


def test_metrics_round_trip_by_kind(metrics: Metrics) -> None:
    assert metrics.rows() == []
    rows = [row(0, "eval", avg=0.5), row(1, reward=0.25), row(2, reward=1e-9)]
    for r in rows:
        metrics.append(r)
    assert metrics.rows() == rows
    assert metrics.rows("step") == rows[1:]
    assert metrics.rows("eval") == rows[:1]


def test_metrics_rewind_drops_the_future(metrics: Metrics) -> None:
    for step in range(4):
        metrics.append(row(step))
    metrics.append(row(3, "eval"))
    metrics.rewind(2)
    assert [r["step"] for r in metrics.rows()] == [0, 1, 2]
    metrics.append(row(3))
    assert [r["step"] for r in metrics.rows()] == [0, 1, 2, 3]
    assert [p.name for p in metrics.path.parent.iterdir()] == ["metrics.jsonl"]


def test_rewind_of_nothing(metrics: Metrics) -> None:
    metrics.rewind(0)
    assert metrics.rows() == []


def test_a_line_cut_off_by_a_crash_costs_only_itself(metrics: Metrics) -> None:
    metrics.append(row(1))
    whole = metrics.path.read_text()
    metrics.path.write_text(whole + '{"kind": "step", "st')
    assert [r["step"] for r in metrics.rows()] == [1]
    metrics.rewind(5)  # what every start of a run does: the next line must not be glued to the broken one
    metrics.append(row(2))
    assert metrics.path.read_text() == "".join(json.dumps(row(i)) + "\n" for i in (1, 2))


def test_a_full_disk_is_said_so(tmp_path: Path) -> None:
    code = """
import json, resource, sys
from pathlib import Path
from kitae.errors import KitaeError
from kitae.store.run_folder import Metrics
metrics = Metrics(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    for step in range(1000):
        metrics.append({"kind": "step", "step": step})
except KitaeError as error:
    print(json.dumps([type(error).__name__, str(error), step]))
"""
    path = tmp_path / "metrics.jsonl"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    kind, message, step = json.loads(ran.stdout)
    assert kind == "DiskFullError"
    assert str(path) in message
    assert [r["step"] for r in Metrics(path).rows()] == list(range(step))
