"""The driver of ranks: what it says of one that is lost or fails, and that no other is left waiting."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from kitae.config.recipe import parse_config
from kitae.errors import TrainerError, TrainerLost
from kitae.trainer.parallel.distributed_trainer import RankedTrainer
from kitae.workers.subprocesses import LocalCluster


def alive(mark: str) -> list[str]:
    """Processes with this in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(entry.name)
        except OSError:
            continue
    return [pid for pid in found if pid != str(os.getpid())]


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> RankedTrainer:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    spread = {"backend": "local", "ranks": 2}
    settings = {"model": {"path": "tiny"}, "data": {"task": "arithmetic"}, "cluster": spread}
    return RankedTrainer(parse_config(settings), "lone_rank", LocalCluster())


async def publish(trainer: RankedTrainer) -> None:
    await trainer.start()
    await trainer.open_weight_store("memory", "full", {})


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("way", "error", "why"),
    [
        ("1:dies", TrainerLost, "a rank of the trainer could not start: killed by signal 9"),
        ("1:refuses", TrainerError, "^no such model"),
        ("0:fails", TrainerLost, "rank 0 of the trainer failed: OSError: no memory"),
    ],
)
def test_one_that_fails_leaves_no_other_waiting(
    way: str, error: type[TrainerError], why: str, trainer: RankedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONE_RANKS", way)
    began = time.monotonic()
    with pytest.raises(error, match=why) as caught:
        asyncio.run(asyncio.wait_for(publish(trainer), 60))
    assert type(caught.value) is error and time.monotonic() - began < 30
    assert not alive(f"LONE_RANKS={way}")
