"""Notes on runs: what readers write is kept in the run's folder, and nobody but the page can write it."""

import json
import os
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from written_runs import HOSTILE, WrittenRun

from kitae.ui.guard import Door
from kitae.ui.library import Library
from kitae.ui.notes import FILE
from kitae.ui.ui_server import make_app


def client(place: Path, door: Door | None = None) -> TestClient:
    return TestClient(make_app(Library([place]), door or Door("127.0.0.1")), base_url="http://127.0.0.1")


def test_notes_are_kept_and_nothing_else_is_changed(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path).step([[1.0]]).finish()
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    asked = client(tmp_path)
    written = {"tags": ["baseline", " good ", "good"], "note": HOSTILE}
    assert asked.post("/api/runs/toy-001/notes", json=written).json() == {"tags": ["baseline", "good"], "note": HOSTILE}
    found = asked.get("/api/runs").json()[0]
    assert (found["tags"], found["note"]) == (["baseline", "good"], HOSTILE)
    assert json.loads((run / FILE).read_text())["tags"] == ["baseline", "good"]
    after = {path: path.read_bytes() for path in run.iterdir() if path.is_file() and path.name != FILE}
    assert after == before


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"tags": "a"}', b'{"note": 1}', json.dumps({"note": "x" * 10_001})])
def test_what_is_no_note_is_refused(body: bytes, tmp_path: Path) -> None:
    run = WrittenRun(tmp_path).finish()
    answer = client(tmp_path).post(
        "/api/runs/toy-001/notes", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 404 and "notes" in answer.json()["error"]
    assert not (run / FILE).exists()


def test_other_pages_cannot_write(tmp_path: Path) -> None:
    run, notes = WrittenRun(tmp_path).finish(), {"tags": [], "note": "mine"}
    asked = client(tmp_path)
    where = "/api/runs/toy-001/notes"
    assert asked.post(where, json=notes, headers={"origin": "http://evil.example"}).status_code == 403
    assert asked.post(where, json=notes, headers={"origin": "null"}).status_code == 403
    plain = {"content-type": "text/plain"}  # what a form of another page could send without being asked first
    assert asked.post(where, content=json.dumps(notes), headers=plain).status_code == 403
    assert asked.post("/api/runs/toy-001", json=notes).status_code == 405
    assert client(tmp_path, Door("0.0.0.0", token="secret")).post(where, json=notes).status_code in (401, 421)
    assert asked.post(where, content=b" " * 200_000, headers={"content-type": "application/json"}).status_code == 413
    assert not (run / FILE).exists()
    assert asked.post(where, json=notes, headers={"origin": "http://127.0.0.1"}).status_code == 200


def test_notes_that_somebody_else_wrote_do_no_harm(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path).finish()
    outside = tmp_path / "outside.json"
    outside.write_text('{"tags": ["secret"], "note": ""}')
    for text in ("nonsense", '{"tags": 7}', "null"):
        (run / FILE).write_text(text)
        assert client(tmp_path).get("/api/runs").json()[0]["tags"] == []
    (run / FILE).unlink()
    os.symlink(outside, run / FILE)
    asked = client(tmp_path)
    assert asked.get("/api/runs").json()[0]["tags"] == []
    asked.post("/api/runs/toy-001/notes", json={"tags": ["mine"], "note": ""})
    assert asked.get("/api/runs").json()[0]["tags"] == ["mine"] and "secret" in outside.read_text()


def test_runs_that_differ_in_their_seed_alone_are_alike(tmp_path: Path) -> None:
    for name, seed, lr in (("a", 1, 1e-5), ("b", 2, 1e-5), ("c", 1, 2e-5)):
        WrittenRun(tmp_path, name, run={"seed": seed}, training={"lr": lr}).finish()
    alike = {run["name"]: run["alike"] for run in client(tmp_path).get("/api/runs").json()}
    assert alike["a-001"] == alike["b-001"] != alike["c-001"]
