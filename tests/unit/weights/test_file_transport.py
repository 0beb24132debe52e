"""Weights as files: what is in the folder, and when it goes."""

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from transport_rigs import same, weights, zeros

from kitae.errors import EngineError
from kitae.weights.file_transport import FilePublisher, FileReceiver
from kitae.weights.stores import FolderStore


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_did_not_change_is_not_written_again(tmp_path: Path) -> None:
    publisher, source = FilePublisher("delta", folder=tmp_path, limit=1024), weights()
    publisher.publish(0, source)
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in files(tmp_path)}
    source["head"][4999] += 1
    manifest = publisher.publish(1, source)
    new = files(tmp_path) - before.keys()
    assert sorted(name.split("-")[0] for name in new) == ["delta", "image"] and manifest.mode == "delta"
    assert all((tmp_path / name).stat().st_mtime_ns == time for name, time in before.items())
    publisher.close()
    assert files(tmp_path) == set()


def test_old_versions_go_and_the_one_before_stays(tmp_path: Path) -> None:
    publisher, source = FilePublisher(folder=tmp_path, limit=1024), weights()
    manifests, counts = [], []
    for version in range(5):
        manifests.append(publisher.publish(version, weights(seed=version)))
        counts.append(len(files(tmp_path)))
    assert counts[0] < min(counts[1:]) and max(counts) <= 2 * counts[0]
    receiver = FileReceiver(tmp_path, zeros(source), patience=0.1)
    assert receiver.fetch(manifests[4]) == () and receiver.fetch(manifests[3]) == ()
    assert receiver.fetch(manifests[2]) != ()
    publisher.close()


def test_a_file_that_is_seen_late_is_waited_for(tmp_path: Path) -> None:
    publisher, source = FilePublisher(folder=tmp_path, limit=1024), weights()
    manifest = publisher.publish(0, source)
    late = tmp_path / sorted(files(tmp_path))[1]
    late.rename(tmp_path / "hidden")
    loaded = zeros(source)
    receiver = FileReceiver(tmp_path, loaded, patience=5.0)
    image = receiver.reader.image

    def shows(*arguments: object) -> object:
        for count, item in enumerate(image(*arguments)):  # type: ignore[arg-type]
            if count == 3:
                (tmp_path / "hidden").rename(late)
            yield item

    receiver.reader.image = shows  # type: ignore[method-assign, assignment]
    assert receiver.fetch(manifest) == () and same(source, loaded)
    publisher.close()


def test_what_an_earlier_run_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("image-00000-0123456789abcdef", "delta-00000-0123456789abcdef.17.tmp", "notes.txt"):
        (tmp_path / name).touch()
    publisher = FilePublisher(folder=tmp_path)
    assert files(tmp_path) == {"notes.txt"}
    publisher.close()
    assert files(tmp_path) == {"notes.txt"}


def test_a_folder_of_its_own_is_gone_at_the_end() -> None:
    publisher = FilePublisher()
    publisher.publish(0, weights())
    assert files(publisher.folder)
    publisher.close()
    assert not publisher.folder.exists()


def test_a_folder_that_the_engine_does_not_see(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"the folder of the weights must be one that this machine has too, got .*no"):
        FileReceiver(tmp_path / "no", {})


def test_a_full_disk_is_an_error_and_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        try:
            store.put("image-00000-0123456789abcdef", torch.zeros(5000, dtype=torch.uint8))
        except EngineError as error:
            os._exit(0 if "weights cannot be written to" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0 and files(tmp_path) == set()
