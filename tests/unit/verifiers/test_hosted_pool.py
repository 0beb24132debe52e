"""Verifier pools in worker processes score as the one beside the controller does; a lost one costs a check time."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kitae.errors import VerifierError
from kitae.store.columns import ColumnWriter, StoredText, column_files
from kitae.types import Prompt, Score
from kitae.verifiers import remote_pool as hosts_module
from kitae.verifiers.config import VerifierConfig
from kitae.verifiers.pool import VerifierPool
from kitae.verifiers.remote_pool import HostedPool
from kitae.workers.base import LaunchError, LaunchSpec
from kitae.workers.subprocesses import LocalCluster

pytestmark = pytest.mark.usefixtures("warm_posts", "warm_verifiers")

OWN = """
import os, time

def host():
    with open(f"/proc/{os.getppid()}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])

def score(response, reference, context):
    if response == "where":
        return {"score": 1.0, "host": host()}
    if response == "poison":
        os.kill(host(), 9)
        time.sleep(60)
    if response == "print":
        print("hello from a check", flush=True)
    time.sleep(context.get("seconds", 0))
    return float(response == reference)
"""


class Site(LocalCluster):
    """Counts what it starts; closed: there is no place any more."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[Any] = []
        self.full = False

    async def start(self, spec: LaunchSpec) -> Any:
        assert spec.pool == "verifiers"
        if self.full:
            raise LaunchError("no machine has 1 CPUs")
        self.processes.append(await super().start(spec))
        return self.processes[-1]


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return f"{path}:score"


def carry_out(body: Callable[[HostedPool, Site], Any], name: str, hosts: int = 2, **options: Any) -> Any:
    async def work() -> Any:
        site = Site()
        try:
            async with HostedPool(VerifierConfig(name=name, workers=2), site, hosts, **options) as pool:
                return await body(pool, site)
        finally:
            await site.close()

    return asyncio.run(work())


@pytest.mark.thorough
def test_the_same_scores_as_beside_the_controller() -> None:
    answers = [("so it is \\boxed{12}", "12"), ("\\boxed{13}", "12"), ("", "12"), ("\\boxed{1/2}", "0.5")]

    async def ask(pool: Any) -> list[Score]:
        return await asyncio.gather(*(pool.score(*each) for each in answers))

    async def near() -> list[Score]:
        async with VerifierPool("math") as pool:
            return await ask(pool)

    async def far(pool: HostedPool, site: Site) -> list[Score]:
        found = await ask(pool)
        assert pool.stats.checked == 4 and len(site.processes) == 2
        assert pool.gold(Prompt("1", (), "12", {})) == "12"
        bad = await pool.score("x", object())
        assert not bad.valid and "must be JSON values" in bad.detail
        return found

    assert carry_out(far, "math") == asyncio.run(near())


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("where", ["at a host", "beside the controller"])
def test_an_answer_in_files_is_read_where_it_is_judged(where: str, tmp_path: Path) -> None:
    async def body(pool: HostedPool | VerifierPool, _: object = None) -> None:
        writer = ColumnWriter(tmp_path, "engine-0")
        places = [await writer.add(range(n), [0.0] * n, "\\boxed{12}" + " and so on" * n) for n in (0, 5, 2000)]
        scores = [await pool.score(StoredText(column_files(tmp_path), place), "12") for place in places]
        assert [score.value for score in scores] == [1.0, 1.0, 1.0]
        (tmp_path / writer.file).write_bytes(b"x" * 10_000)
        lost = await pool.score(StoredText(column_files(tmp_path), replace(places[1], checksum=7)), "12")
        assert not lost.valid and f"{writer.file}: the answer at byte" in lost.detail
        assert (pool.stats.checked, pool.stats.errors) == (4, 1)

    async def near() -> None:
        async with VerifierPool("math", {}, workers=1, timeout=30) as pool:
            await body(pool)

    if where == "at a host":
        carry_out(body, "math", hosts=1)
    else:
        asyncio.run(near())


def test_checks_are_shared_out_and_prints_are_heard(own: str) -> None:
    said: list[str] = []

    async def body(pool: HostedPool, site: Site) -> None:
        slow = [asyncio.create_task(pool.score("a", "a", {"seconds": 1})) for _ in range(2)]
        await asyncio.sleep(0.1)
        found = await asyncio.gather(*(pool.score("where", "") for _ in range(2)))
        assert {int(s.components["host"]) for s in found} == {process.pid for process in site.processes}
        assert [(await s).value for s in slow] == [1, 1]
        await pool.score("print", "")
        async with asyncio.timeout(10):
            while not any("hello from a check" in line for line in said):
                await asyncio.sleep(0.05)

    carry_out(body, own, note=said.append)


def test_a_host_that_is_killed_is_replaced_and_its_checks_repeated(own: str) -> None:
    said: list[str] = []

    async def body(pool: HostedPool, site: Site) -> None:
        tasks = [asyncio.create_task(pool.score(str(i % 3), "1", {"seconds": 0.3})) for i in range(12)]
        await asyncio.sleep(0.4)
        os.kill(site.processes[0].pid, signal.SIGKILL)
        found = await asyncio.gather(*tasks)
        assert [s.value for s in found] == [float(i % 3 == 1) for i in range(12)] and all(s.valid for s in found)
        assert pool.stats.checked == 12 and pool.stats.restarts == 1 and pool.stats.retries > 0
        async with asyncio.timeout(30):
            while len(pool.members) < 2:
                await asyncio.sleep(0.1)
        assert [place.load for place in pool._places] == [0, 0]
        os.kill(site.processes[1].pid, signal.SIGKILL)
        os.kill(site.processes[2].pid, signal.SIGKILL)
        assert (await pool.score("1", "1")).value == 1, "with none left it waits for the next"

    carry_out(body, own, note=said.append)
    assert "a verifier host was lost: the run goes on with 1 of 2, and starts another: killed by signal 9" in said[0]


class Staggered(HostedPool):
    """Its first host is lost while the second is started."""

    _begun = 0
    _first: Any = None

    async def _begin(self, number: int) -> Any:
        self._begun += 1
        if self._begun != 2:
            host = await super()._begin(number)
            self._first = self._first or host
            return host
        while self._first is None:
            await asyncio.sleep(0.05)
        os.kill(self._first.remote.pid, signal.SIGKILL)
        await self._first.lost
        return await super()._begin(number)


def test_a_host_that_is_lost_while_others_start_gets_no_checks(own: str) -> None:
    async def body() -> None:
        site = Site()
        async with Staggered(VerifierConfig(name=own, workers=1), site, 2, 30) as pool:
            async with asyncio.timeout(60):
                found = await asyncio.gather(*(pool.score("1", "1") for _ in range(4)))
            assert all(score.value == 1 for score in found) and pool.stats.restarts == 1
        await site.close()

    asyncio.run(body())


def test_a_check_that_ends_its_hosts_is_given_up(own: str) -> None:
    async def body(pool: HostedPool, site: Site) -> None:
        poison, good = asyncio.create_task(pool.score("poison", "")), pool.score("1", "1", {"seconds": 0.1})
        assert (await good).value == 1
        assert (await poison).detail == "its verifier host was lost 3 times" and not (await poison).valid

    carry_out(body, own)


def test_without_a_place_the_others_go_on_and_without_any_checks_are_errors(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "_RETRY", 0.2)

    async def body(pool: HostedPool, site: Site) -> None:
        site.full = True
        os.kill(site.processes[0].pid, signal.SIGKILL)
        await site.processes[0].wait()
        assert [(await pool.score("1", "1")).value for _ in range(4)] == [1.0] * 4
        os.kill(site.processes[1].pid, signal.SIGKILL)
        await site.processes[1].wait()
        await asyncio.sleep(0.2)
        late = await pool.score("1", "1")
        assert late.detail.startswith("no verifier host is left, and none was found within 1 s") and not late.valid
        site.full = False
        async with asyncio.timeout(30):
            while not (await pool.score("1", "1")).valid:
                pass

    carry_out(body, own, patience=1.0)


def test_a_caller_that_leaves_and_a_pool_that_closes(own: str) -> None:
    async def body(pool: HostedPool, site: Site) -> "asyncio.Task[Score]":
        gone = asyncio.create_task(pool.score("1", "1", {"seconds": 60}))
        await asyncio.sleep(0.3)
        gone.cancel()
        await asyncio.wait({gone})
        assert (await pool.score("1", "1")).value == 1
        left = asyncio.create_task(pool.score("1", "1", {"seconds": 60}))
        await asyncio.sleep(0.3)
        await pool.close()
        assert (await left).detail == "the verifier pool was closed" and not (await left).valid
        with pytest.raises(VerifierError, match="got a call outside"):
            await pool.score("1", "1")
        return left

    carry_out(body, own, hosts=1)


def test_what_cannot_start_says_why() -> None:
    async def nothing(pool: HostedPool, site: Site) -> None:
        raise AssertionError("it cannot have started")

    for config, why in (("nonsense", "nonsense"),):
        with pytest.raises(VerifierError, match=why):
            carry_out(nothing, config)

    async def full() -> None:
        site = Site()
        site.full = True
        await HostedPool(VerifierConfig(name="exact"), site, 1).start()

    with pytest.raises(VerifierError, match="no machine has 1 CPUs"):
        asyncio.run(full())
