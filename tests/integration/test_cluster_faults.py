"""Whoever is killed, and whatever the run is doing just then: nothing is lost, nothing is trained twice.

A run is held in the middle of a phase (`holding`), somebody is killed, and the run goes on, or is resumed where the
controller itself was the victim. One run has many such deaths, one after the other: between two of them it waits in a
score function until whoever was killed has been replaced. At the end the ledger must balance, every step must be there
once, no process and no named memory may be left, and a run on-policy must have learnt what one that nobody disturbed
has.

How long each took is printed (`-s`): to the next step that is new, and until whoever was killed has been replaced.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from harness import HERE, RECIPE, kitae, rows, toy_config
from holding import FOLDER, lines
from test_async import check_ledger
from test_ranked import assert_same_learning
from warm_starts import context

from kitae.store.journal import Journal

pytestmark = pytest.mark.slow

DUTIES = {
    "rank": "kitae.trainer.parallel.rank_process",
    "engine": "kitae.engines.process.engine_main",
    "verifier host": "kitae.verifiers.pool_process",
    "server": "vllm.entrypoints.openai.api_server",
}
"""Modules that their processes run."""

PHASES = ("generate", "score", "learn", "update", "publish", "fetch", "save")
HELD_BY = {
    "generate": "engine", "score": "", "learn": "rank", "update": "rank", "publish": "rank", "fetch": "engine",
    "save": "rank",
}  # fmt: skip
"""Who can be held in a phase; nobody: a worker of a verifier host."""

TOY = (
    f"verifier.name={HERE / 'holding.py'}:digits", "verifier.timeout=100", "verifier.check_gold=false",
    "eval.prompts=0", "checkpoint.every=2", "training.prompts_per_step=2", "training.group_size=4",
    "training.lr=1e-4",
)  # fmt: skip
SPREAD = ("cluster.backend=local", "cluster.ranks=2", "engine.count=2", "cluster.verifiers=1")
_PATHS = (HERE / "hooked", HERE, HERE.parent / "stand_ins", HERE.parent, HERE.parents[1])
SERVED = (
    "cluster.backend=local", "cluster.ranks=2", "cluster.verifiers=1", "engine.kind=vllm", "engine.count=2",
    f"engine.server=env PYTHONPATH={os.pathsep.join(map(str, _PATHS))} {sys.executable}",
)  # fmt: skip
"""Servers that Kitae starts: stand-ins for vLLM."""
BY_ACTOR = {"server": SERVED}
LIMIT = 300.0  # seconds for anything, on a busy machine


@dataclass(frozen=True)
class Recovery:
    """`Recovery("engine", "generate", moved=0.4, replaced=5.2)`: seconds after its death."""

    actor: str
    phase: str
    moved: float
    replaced: float

    def __str__(self) -> str:
        return f"{self.actor:16} {self.phase:10} {self.moved:6.1f} {self.replaced:6.1f}"


@dataclass
class Trial:
    """A run in a folder of its own. nodes: of the Ray cluster that it is on, if it is."""

    folder: Path
    settings: tuple[str, ...]
    steps: int
    nodes: Any = None
    recoveries: list[Recovery] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run = self.folder / "toy-001"
        self.metrics = self.run / "metrics.jsonl"
        self.known: dict[tuple[int, int], Any] = {}
        self.memory: set[str] = set()
        self.held = 0

    @property
    def _all_settings(self) -> tuple[str, ...]:
        return (*TOY, *self.settings, f"training.steps={self.steps}")

    def start(self) -> None:
        self.command = kitae("train", str(RECIPE), f"run.dir={self.folder}", *self._all_settings)

    def resume(self) -> None:
        self.command = kitae("resume", str(self.run))

    # A death.

    def strike(self, actor: str, phase: str) -> None:
        """Kill somebody in the middle of a phase, and wait until the run has a new step, is whole again, and paused."""
        rank = int(actor[-1]) if actor.startswith("rank") and HELD_BY[phase] == "rank" else None
        self.arm(phase, rank=rank)
        self.release()
        held = self.reached(phase)
        self._remember()
        before, posts = self.joined(), self._posts(actor)
        self.arm("score", after=lines(self.metrics) + 1)
        began = time.time()
        self._kill(actor, held if held in posts else None)
        self.release()
        self.reached("score")
        moved = self.metrics.stat().st_mtime - began
        self.until(lambda: self._is_whole(actor, before, posts), f"another {actor}")
        self.recoveries.append(Recovery(actor, phase, moved, time.time() - began))
        print(self.recoveries[-1], flush=True)

    def _kill(self, actor: str, held: int | None) -> None:
        if actor == "controller":
            self.command.send_signal(signal.SIGKILL)
            self.command.ended(LIMIT)
            self.release()
            self.all_end()
            self.resume()
        elif actor.startswith("node"):
            self._cut_power(self._victim(actor.removeprefix("node of ")))
        elif actor.startswith("keeper"):
            os.kill(_parent(self._victim(actor.removeprefix("keeper of "))), signal.SIGKILL)
        else:
            os.kill(held or self._victim(actor), signal.SIGKILL)

    def _cut_power(self, pid: int) -> None:
        """Of the node that a process is on; another comes in its place."""
        raylet = _parent(_parent(pid))
        nodes = {node.all_processes["raylet"][0].process.pid: node for node in self.nodes.nodes.worker_nodes}
        self.nodes.remove(nodes[raylet])
        add_far(self.nodes)

    def _victim(self, actor: str) -> int:
        if actor.startswith("rank"):
            return int((self.folder / actor.replace(" ", "-")).read_text())
        return self.posts(actor)[0]

    def _is_whole(self, actor: str, joined: int, posts: Sequence[int]) -> bool:
        if actor == "engine":
            return self.joined() > joined
        if actor in DUTIES:
            return len(self.posts(actor)) == len(posts) and self.posts(actor) != posts
        return [len(self.posts(each)) for each in ("rank", "engine", "verifier host")] == [2, 2, 1]

    def _posts(self, actor: str) -> list[int]:
        return self.posts(actor) if actor in DUTIES else []

    def joined(self) -> int:
        """Engines that have taken the place of others."""
        return len(re.findall(r"\bengine \d+ has joined", self.command.printed()))

    # Holding.

    def arm(self, point: str, *, rank: int | None = None, duty: str = "", after: int = 0, name: str = "arm") -> None:
        (self.folder / "reached").unlink(missing_ok=True)
        (self.folder / "draft").write_text(
            json.dumps({"point": point, "rank": rank, "duty": duty, "after": after, "metrics": "toy-001/metrics.jsonl"})
        )
        (self.folder / "draft").rename(self.folder / name)

    def pause(self) -> None:
        """Before the next score, whoever else is held meanwhile."""
        self.arm("score", name="pause")

    def go_on(self) -> None:
        pid = self.until(lambda: _read(self.folder / "paused"), "a pause")
        (self.folder / f"go-{pid}").touch()

    def reached(self, point: str) -> int:
        self.held = int(self.until(lambda: _read(self.folder / "reached"), f"the phase {point!r}"))
        return self.held

    def release(self) -> None:
        (self.folder / f"go-{self.held}").touch()

    def until(self, found: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            if value := found():
                return value
            assert self.command.poll() is None, f"the run ended before {what}:\n{self.command.printed()}"
            time.sleep(0.1)
        raise AssertionError(f"{what} did not happen within {LIMIT:g} s:\n{self.command.printed()}")

    # What there is.

    def processes(self) -> dict[int, list[str]]:
        """All that belong to this run and are no part of Ray, with their arguments, but for the controller."""
        mark = f"{FOLDER}={self.folder}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    if words[0] and "ray" not in words[0] and not any("/ray/" in word for word in words[:3]):
                        found[int(entry.name)] = words
            except OSError:
                continue
        return found

    def all_end(self) -> None:
        deadline = time.monotonic() + 20
        while left := self.processes():
            assert time.monotonic() < deadline, f"they must end with the run: {left}"
            time.sleep(0.1)

    def posts(self, actor: str) -> list[int]:
        """Not what only holds it on a tether."""
        return sorted(pid for pid, words in self.processes().items() if DUTIES[actor] in words[:4])

    def _remember(self) -> None:
        """What must still be there at the end, and what must not."""
        for pid in self.processes():
            maps = _read(Path(f"/proc/{pid}/maps"))
            self.memory |= {line.split()[-1] for line in maps.splitlines() if "/dev/shm/" in line}
        found = rollouts(self.run)
        assert found.items() >= self.known.items(), "a rollout is lost"
        self.known = found

    # The end.

    def finish(self) -> str:
        self.release()
        return ended(self.command)

    def check(self) -> None:
        found = [row["step"] for row in rows(self.run) if row["kind"] == "step"]
        assert found == list(range(1, self.steps + 1))
        check_ledger(self.run, toy_config(self.folder, *self._all_settings))
        assert rollouts(self.run).items() >= self.known.items(), "a rollout is lost"
        self.all_end()
        assert not [name for name in self.memory if os.path.exists(name)]

    def events(self, kind: str) -> int:
        journal = Journal(self.run / "journal.sqlite", read_only=True)
        try:
            return [each for _, each, _ in journal.events()].count(kind)
        finally:
            journal.close()

    def close(self) -> None:
        if isinstance(getattr(self, "command", None), Command):
            self.command.kill()
        self.release()


def ended(command: Command) -> str:
    output = command.ended(LIMIT)
    assert command.returncode == 0, output
    return output


def rollouts(run: Path) -> dict[tuple[int, int], Any]:
    """What was sampled and written down, by group and index."""
    journal = Journal(run / "journal.sqlite", read_only=True)
    try:
        found = (rollout for group in range(journal.issued()[0]) for rollout in journal.rollouts(group))
        return {(rollout.group, rollout.index): rollout.segments for rollout in found}
    finally:
        journal.close()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def length(deaths: int) -> int:
    """Steps of a run with so many: each takes two at most, one that is held and one that is paused."""
    return 2 * deaths + 3


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Trial]]:
    """`trial(SPREAD, steps=5)`: posts of its processes can be held."""
    made: list[Trial] = []
    context()
    forkserver.ensure_running()  # before what follows, which is for the processes of this run alone
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (HERE / "hooked", HERE, *_paths()))))

    def make(settings: Sequence[str], steps: int, nodes: Any = None) -> Trial:
        made.append(Trial(tmp_path, tuple(settings), steps, nodes))
        return made[0]

    yield make
    for each in made:
        each.close()


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On-policy, of the longest length, in the same processes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    steps = f"training.steps={length(len(PHASES))}"
    ended(kitae("train", str(RECIPE), f"run.dir={folder}", *TOY, *SPREAD, steps))
    return folder / "toy-001"


def suffer(trial: Trial, deaths: Sequence[tuple[str, str]]) -> None:
    """All of them in one run, which is then checked."""
    trial.start()
    trial.arm("score")
    trial.reached("score")
    for actor, phase in deaths:
        trial.strike(actor, phase)
    trial.finish()
    trial.check()


@pytest.mark.sentinel
@pytest.mark.timeout(900)
def test_a_few_deaths(trial: Callable[..., Trial]) -> None:
    """With the trainer in the controller; `test_ranked` has a rank that is killed."""
    deaths = [("verifier host", "score"), ("engine", "generate")]
    suffer(trial(("cluster.backend=local", "engine.count=2", "cluster.verifiers=1"), length(len(deaths))), deaths)


ALONE = ("engine", "verifier host", "rank 1", "controller", "rank 0")
SERVERS = [
    ("server", PHASES[at : at + 3]) for at in range(0, len(PHASES), 3)
]  # more deaths in ten minutes are too many


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("actor", "phases"), [*((actor, PHASES) for actor in ALONE), *SERVERS])
def test_at_every_phase(actor: str, phases: tuple[str, ...], trial: Callable[..., Trial], undisturbed: Path) -> None:
    run = trial(BY_ACTOR.get(actor, SPREAD), length(len(PHASES)))
    suffer(run, [(actor, phase) for phase in phases])
    if actor == "server":  # an answer that another server continues has draws of its own
        steps = [row for row in rows(run.run) if row["kind"] == "step"]
        assert len(steps) == length(len(PHASES)) and max(row["logp_gap_max"] for row in steps) < 1e-4
    else:
        assert_same_learning(run.run, undisturbed)
    assert run.events("trainer lost") == (len(PHASES) if actor.startswith("rank") else 0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("actor", ["rank 1", "engine", "verifier host", "controller"])
def test_at_the_start(actor: str, trial: Callable[..., Trial]) -> None:
    """A rank is started again in the same command; who else does not come up ends it, and it can be resumed."""
    run = trial(SPREAD, steps=2)
    duty = actor.removesuffix(" 1")
    run.arm("start", rank=1 if duty == "rank" else None, duty=DUTIES.get(duty, ""))
    run.start()
    held = run.reached("start")
    began = time.monotonic()
    os.kill(run.command.pid if actor == "controller" else held, signal.SIGKILL)
    run.release()
    if duty != "rank":
        output = run.command.ended(LIMIT)
        assert run.command.returncode == (-signal.SIGKILL if actor == "controller" else 1), output
        assert actor == "controller" or "could not start: killed by signal 9" in output
        run.all_end()
        run.resume()
    run.until(lambda: lines(run.metrics) or run.command.poll() == 0, "a step")
    print(Recovery(actor, "start", time.monotonic() - began, time.monotonic() - began))
    run.finish()
    run.check()
    assert run.events("trainer lost") == (duty == "rank")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("actor", "phase"), [("rank 0", "publish"), ("engine", "fetch")])
def test_the_successor_dies_too(actor: str, phase: str, trial: Callable[..., Trial]) -> None:
    run = trial(SPREAD, steps=length(1))
    run.start()
    run.arm(phase, rank=0 if actor == "rank 0" else None)
    held = run.reached(phase)
    run.pause()
    run.arm("start", duty=DUTIES[actor.removesuffix(" 0")])
    os.kill(held, signal.SIGKILL)
    run.release()
    successor = run.reached("start")
    began, step = time.monotonic(), lines(run.metrics)
    os.kill(successor, signal.SIGKILL)
    run.go_on()
    run.until(lambda: lines(run.metrics) > step or run.command.poll() == 0, "a step")
    print(Recovery(actor, f"{phase}, start", time.monotonic() - began, time.monotonic() - began))
    run.finish()
    run.check()


AHEAD = (
    "pipeline.max_staleness=1", "pipeline.refill=3", "algorithm.filter=zero-variance", "pipeline.refill.most=20",
    "sampling.max_tokens=3", "training.group_size=3",
)  # fmt: skip
TALKING = (f"env.name={HERE / 'reckoning.py'}:Reckoning", "verifier.max_error_share=1")


@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    ("settings", "deaths"),
    [
        (
            AHEAD,
            [("rank 1", "update"), ("engine", "generate"), ("controller", "score"), ("rank 0", "publish"),
             ("verifier host", "learn"), ("engine", "fetch")],
        ),
        (("cluster.transport=broadcast",), [("engine", "fetch"), ("engine", "generate"), ("rank 0", "publish")]),
        (TALKING, [("engine", "generate"), ("rank 1", "learn"), ("engine", "score")]),
    ],
    ids=["ahead", "broadcast", "talking"],
)  # fmt: skip
def test_with(settings: tuple[str, ...], deaths: list[tuple[str, str]], trial: Callable[..., Trial]) -> None:
    suffer(trial((*SPREAD, *settings), length(len(deaths))), deaths)


FAR = "{ labels = { kitae-kind = 'far' }, cpus = 0.3 }"
ON_RAY = [f"cluster.pools.{pool}={FAR}" for pool in ("trainer", "engines", "verifiers")]


@pytest.fixture
def nodes(trial: Callable[..., Trial]) -> Iterator[Any]:
    """With the episode_context of the trial. The controller's node has no place for anybody else."""
    if find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'kitae[cluster]'")
    from kitae.workers.ray.ray_session import OwnNodes

    own = OwnNodes.start(1)
    for _ in range(2):
        add_far(own)
    yield own
    own.close()


def add_far(nodes: Any) -> None:
    number = 1 + len(nodes.nodes.worker_nodes)
    nodes.add(number, labels={"kitae-node": str(number), "kitae-kind": "far"})


@pytest.mark.timeout(3000)
def test_on_ray(trial: Callable[..., Trial], nodes: Any) -> None:
    deaths = [
        ("keeper of engine", "generate"), ("keeper of rank 1", "update"), ("keeper of verifier host", "score"),
        ("node of engine", "fetch"), ("node of rank 1", "learn"), ("node of rank 0", "save"), ("controller", "publish"),
    ]  # fmt: skip
    address = f"cluster.address={nodes.address}"
    local = {"cluster.backend=local": "cluster.backend=ray"}
    run = trial((*(local.get(s, s) for s in SPREAD), address, *ON_RAY), length(len(deaths)), nodes)
    suffer(run, deaths)
