"""Checkpoints are there completely or not at all, and a damaged one is never used."""

import asyncio
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kitae.errors import CorruptError, StoreError
from kitae.store import sealed
from kitae.store.checkpoints import Checkpoints, Frontier
from kitae.store.disk import flush


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def save(checkpoints: Checkpoints, step: int) -> Path:
    return save_with(checkpoints, Frontier(step, 2 * step), lambda folder: write(folder, str(step)))


def save_with(checkpoints: Checkpoints, frontier: Frontier, write: Callable[[Path], object]) -> Path:
    async def written(folder: Path) -> None:
        write(folder)

    return asyncio.run(checkpoints.save(frontier, written))


def write(folder: Path, content: str) -> None:
    (folder / "weights.bin").write_bytes(content.encode() * 1000)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_round_trip(checkpoints: Checkpoints) -> None:
    target = save(checkpoints, 3)
    assert target.name == "step-000003"
    frontier, folder = checkpoints.load()
    assert frontier == Frontier(step=3, updates=6)
    assert (folder / "weights.bin").read_bytes() == b"3" * 1000


def test_what_ranks_have_summed_up_is_not_read_again(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    plain = sealed.file_seal
    monkeypatch.setattr(sealed, "file_seal", lambda path: (read.append(path.name), plain(path))[1])

    def write_parts(folder: Path) -> None:
        (folder / "sharded").mkdir()
        for rank in range(2):
            path = folder / "sharded" / f"__{rank}_0.distcp"
            path.write_bytes(bytes([rank]) * 1000)
            sealed.leave_seal(path)
        read.clear()

    target = save_with(checkpoints, Frontier(3, 6), write_parts)
    assert read == ["frontier.json"], "the controller reads no shard"
    assert sorted(path.name for path in (target / "sharded").iterdir()) == ["__0_0.distcp", "__1_0.distcp"]
    assert checkpoints.load()[1] == target
    (target / "sharded" / "__1_0.distcp").write_bytes(b"4")
    with pytest.raises(CorruptError, match=r"__1_0\.distcp has checksum"):
        checkpoints.load()


def test_files_in_folders_are_checked_too(checkpoints: Checkpoints) -> None:
    """As ranks write them."""

    def write_parts(folder: Path) -> None:
        (folder / "sharded").mkdir()
        write(folder / "sharded", "3")

    target = save_with(checkpoints, Frontier(3, 6), write_parts)
    assert checkpoints.load()[1] == target
    (target / "sharded" / "weights.bin").write_bytes(b"4")
    with pytest.raises(CorruptError, match=r"sharded/weights\.bin has checksum"):
        checkpoints.load()


def test_the_newest_is_loaded_and_old_ones_are_pruned(checkpoints: Checkpoints) -> None:
    for step in (9, 999_999, 1_000_000):
        save(checkpoints, step)
    assert checkpoints.names() == ["step-999999", "step-1000000"]
    assert checkpoints.load()[0].step == 1_000_000
    assert checkpoints.load("step-999999")[0].step == 999_999
    assert {p.name for p in checkpoints.folder.iterdir()} == set(checkpoints.names())


def test_the_old_one_is_pruned_only_after_the_new_one_is_safe(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)

    def look(folder: Path) -> None:
        assert checkpoints.names() == ["step-000001"]
        write(folder, "2")

    save_with(checkpoints, Frontier(2, 4), look)
    assert checkpoints.names() == ["step-000002"]


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), KeyboardInterrupt(), OSError("no")], ids=lambda e: type(e).__name__
)
def test_a_write_that_fails_leaves_no_trace(checkpoints: Checkpoints, error: BaseException) -> None:
    save(checkpoints, 1)
    before = snapshot(checkpoints.folder)

    def fail(folder: Path) -> None:
        write(folder, "2")
        raise error

    with pytest.raises(type(error)):
        save_with(checkpoints, Frontier(2, 4), fail)
    assert snapshot(checkpoints.folder) == before
    assert [p.name for p in checkpoints.folder.iterdir()] == ["step-000001"]
    assert checkpoints.load()[0].step == 1


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("closes", [False, True], ids=["cancelled", "its loop is closed"])
def test_a_save_that_is_cancelled_leaves_all_or_nothing(
    times: int, closes: bool, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that completes it goes on; nothing may be taken away from under it, however often it is asked to."""
    flushing, go_on = threading.Event(), threading.Event()

    def slow_flush(path: Path) -> None:
        flushing.set()
        assert go_on.wait(10)
        flush(path)

    async def written(folder: Path) -> None:
        write(folder, "1")

    async def cancel() -> None:
        saving = asyncio.create_task(checkpoints.save(Frontier(1, 2), written))
        await asyncio.to_thread(flushing.wait, 10)
        for _ in range(times):
            saving.cancel()
            await asyncio.sleep(0.05)
        there = {p.name for p in checkpoints.folder.glob("*/*")}
        assert there == {"weights.bin", "frontier.json", "manifest.json"}
        if closes:  # which cancels all tasks
            threading.Timer(0.2, go_on.set).start()
            return
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await saving

    monkeypatch.setattr("kitae.store.checkpoints.flush", slow_flush)
    asyncio.run(cancel())
    assert checkpoints.load()[0].step == 1
    assert [p.name for p in checkpoints.folder.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("how", ["too many", "given up"])
def test_a_removal_that_is_killed_leaves_nothing_that_looks_like_a_checkpoint(
    how: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(checkpoints, step)
    remove = shutil.rmtree

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            (path / "manifest.json").unlink()
            raise KeyboardInterrupt
        remove(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(checkpoints, 3) if how == "too many" else checkpoints.forget_after(1)
    monkeypatch.undo()
    assert checkpoints.names() == (["step-000002", "step-000003"] if how == "too many" else ["step-000001"])
    assert checkpoints.load()[0].step == (3 if how == "too many" else 1)
    checkpoints.clear_leftovers()
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == checkpoints.names()


def test_what_a_killed_save_left_is_ignored_and_replaced(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    leftover = checkpoints.folder / ".partial-step-000002"
    leftover.mkdir()
    (leftover / "old.bin").write_text("half")
    assert checkpoints.names() == ["step-000001"]
    target = save(checkpoints, 2)
    assert not leftover.exists()
    assert not (target / "old.bin").exists()
    leftover.mkdir()
    checkpoints.clear_leftovers()
    assert not leftover.exists() and checkpoints.names() == ["step-000001", "step-000002"]


def test_a_saved_step_is_not_written_again(checkpoints: Checkpoints) -> None:
    target = save(checkpoints, 1)

    def unexpected(folder: Path) -> None:
        raise AssertionError("written twice")

    assert save_with(checkpoints, Frontier(1, 2), unexpected) == target


def _flip(folder: Path) -> None:
    content = bytearray((folder / "weights.bin").read_bytes())
    content[500] ^= 1
    (folder / "weights.bin").write_bytes(content)


def _cut(folder: Path) -> None:
    (folder / "weights.bin").write_bytes((folder / "weights.bin").read_bytes()[:-1])


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _put(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None  # type: ignore[func-returns-value]


DAMAGE = {
    "flipped bit": (_flip, "weights.bin has checksum"),
    "cut off": (_cut, "weights.bin has checksum"),
    "missing file": (_remove("weights.bin"), "weights.bin is missing"),
    "missing manifest": (_remove("manifest.json"), "its manifest cannot be read"),
    "empty manifest": (_put("manifest.json", ""), "its manifest cannot be read"),
    "manifest of nothing": (_put("manifest.json", "{}"), "frontier.json"),
    "manifest that is no mapping": (_put("manifest.json", "[1, 2]"), "its manifest cannot be read"),
    "changed frontier": (_put("frontier.json", '{"step": 5, "updates": 0}'), "frontier.json has checksum"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_names_the_file_and_the_way_out_and_changes_nothing(checkpoints: Checkpoints, kind: str) -> None:
    damage, message = DAMAGE[kind]
    save(checkpoints, 1)
    damage(save(checkpoints, 2))
    before = snapshot(checkpoints.folder)
    with pytest.raises(CorruptError) as caught:
        checkpoints.load()
    assert message in str(caught.value)
    assert str(checkpoints.folder / "step-000002") in str(caught.value)
    assert "Nothing was changed. Go on from an older one with --from step-000001." in str(caught.value)
    assert snapshot(checkpoints.folder) == before
    assert checkpoints.load("step-000001")[0].step == 1


def test_the_only_checkpoint_damaged_offers_the_start(checkpoints: Checkpoints) -> None:
    _flip(save(checkpoints, 1))
    with pytest.raises(CorruptError) as caught:
        checkpoints.load()
    assert "There is no older one; --from start trains all steps again" in str(caught.value)


def test_names_that_are_not_there(checkpoints: Checkpoints) -> None:
    with pytest.raises(StoreError, match="holds no checkpoint"):
        checkpoints.load()
    save(checkpoints, 1)
    save(checkpoints, 2)
    with pytest.raises(StoreError, match=r"no checkpoint 'step-7' in .*; there are step-000001, step-000002"):
        checkpoints.load("step-7")


def test_forget_after(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    for step in (0, 5, 10, 15):
        save(checkpoints, step)
    checkpoints.forget_after(5)
    assert checkpoints.names() == ["step-000000", "step-000005"]
    checkpoints.forget_after(5)
    assert checkpoints.load()[0].step == 5
    shutil.rmtree(tmp_path)
    checkpoints.forget_after(0)


WRITERS = {
    "python": "(folder / 'weights.bin').write_bytes(bytes(5_000_000))",
    "safetensors": (
        "from safetensors.numpy import save_file; import numpy; "
        "save_file({'w': numpy.zeros(1_000_000)}, folder / 'weights.safetensors')"
    ),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_leaves_the_last_good_checkpoint(checkpoints: Checkpoints, writer: str) -> None:
    """A limit on the size of files stands for the disk's: the system refuses the write in the same place."""
    save(checkpoints, 1)
    before = snapshot(checkpoints.folder)
    code = f"""
import asyncio, json, resource, sys
from pathlib import Path
from kitae.errors import KitaeError
from kitae.store.checkpoints import Checkpoints, Frontier
from kitae.store.disk import flush
async def write(folder):
    {WRITERS[writer]}
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    asyncio.run(Checkpoints(Path(sys.argv[1]), 1).save(Frontier(2, 4), write))
except KitaeError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, str(checkpoints.folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    kind, message = json.loads(ran.stdout)
    assert kind == "DiskFullError"
    assert "no space left to write checkpoint step-000002" in message
    assert "untouched: step-000001" in message
    assert snapshot(checkpoints.folder) == before
    assert [p.name for p in checkpoints.folder.iterdir()] == ["step-000001"]
