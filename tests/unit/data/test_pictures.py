"""Pictures of rows, of Python and of chats: where they are read, what is refused, and where they are kept."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from seeing import picture, source

from kitae.data.config import DataConfig, ExamplesConfig
from kitae.data.examples import open_examples
from kitae.data.picture_columns import with_pictures
from kitae.data.pictures import PICTURE, SHELF, Shelf, name_of, shown, sources_of
from kitae.data.prompt_stream import open_stream
from kitae.errors import DataError, StoreError
from kitae.scripting.given_rows import read_given


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for seed, name in enumerate(("a.png", "b.jpg")):
        picture(seed).save(tmp_path / name)
    return [name_of(SHELF.put(str(tmp_path / name))) for name in ("a.png", "b.jpg")]


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("said", "row", "expected"),
    [
        ("Hm?", {"image": "a.png"}, [0, "Hm?"]),
        ("Hm?", {"images": ["a.png", {"bytes": None, "path": "b.jpg"}]}, [0, 1, "Hm?"]),
        ("Is <image> like <image>?", {"images": ["a.png", "b.jpg"]}, ["Is ", 0, " like ", 1, "?"]),
        (user({"type": "image"}, text("x"), {"type": "image"}), {"images": ["b.jpg", "a.png"]}, [1, "x", 0]),
        (user(text("x"), {"type": "image", "image": "a.png"}), {}, ["x", 0]),
        (user({"type": "image_url", "image_url": {"url": "b.jpg"}}, text("x")), {}, [1, "x"]),
    ],
)
def test_each_layout_shows_its_pictures(
    said: Any, row: dict[str, Any], expected: list[Any], files: list[str], tmp_path: Path
) -> None:
    (turn,) = with_pictures(said, row, tmp_path)
    wanted = [text(e) if isinstance(e, str) else {"type": "image", "image": files[e]} for e in expected]
    assert turn == {"role": "user", "content": wanted}


@pytest.mark.parametrize(
    ("said", "row", "complaint"),
    [
        ("x", {"image": "https://example.org/a.png"}, "must not be an address"),
        ("x", {"image": "none.png"}, "cannot read the picture"),
        ("x", {"image": "rows.txt"}, "a file that PIL reads"),
        ("x", {"image": "data:image/png;base64,%%"}, "valid base64"),
        ("x", {"image": 5}, "must be a path"),
        ("<image>", {"images": ["a.png", "a.png"]}, "that are left"),
        ("<image><image>", {"images": ["a.png"]}, "more pictures than"),
        (user({"type": "image"}), {}, "more pictures than"),
    ],
)
def test_what_is_no_picture_is_refused(
    said: Any, row: dict[str, Any], complaint: str, files: list[str], tmp_path: Path
) -> None:
    (tmp_path / "rows.txt").write_text("text")
    with pytest.raises(DataError, match=complaint):
        with_pictures(said, row, tmp_path)


def test_text_stays_as_it_is(tmp_path: Path) -> None:
    assert with_pictures("What is <image>?", {"other": 1}, tmp_path) == "What is <image>?"
    assert with_pictures([{"role": "user", "content": "x"}], {}, tmp_path) == [{"role": "user", "content": "x"}]


def test_prompts_and_examples_of_files(files: list[str], tmp_path: Path) -> None:
    """As parquet of the hub has them, in bytes; the verifier's context holds no picture."""
    content = (tmp_path / "a.png").read_bytes()
    rows = [{"question": "Hm?", "answer": "4", "images": [{"bytes": content, "path": "elsewhere.png"}], "level": 2}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    prompt = open_stream(DataConfig(path=str(tmp_path / "rows.parquet")), 0).at(0)
    assert list(sources_of(prompt.messages)) == files[:1]
    assert dict(prompt.context) == {"question": "Hm?", "level": 2}
    row = {"prompt": "Hm?", "chosen": "4", "rejected": "5", "image": "b.jpg"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
    (pair,) = open_examples(ExamplesConfig(path=str(tmp_path / "pairs.jsonl")), 0, "preference").sources[0]
    assert all(list(sources_of(c.messages)) == files[1:] for c in pair.conversations)


def test_pictures_of_python(files: list[str], tmp_path: Path) -> None:
    rows = read_given("data", [{"question": "Hm?", "answer": "4", "image": picture(0)}])
    found = shown(json.loads(rows.lines[0])["image"])
    assert found["image"] == files[0]


def test_demonstrations_of_a_task_that_draws() -> None:
    config = ExamplesConfig(task="read-number", params={"side": 32}, problems=3)
    first, *_ = open_examples(config, 0, "demonstration").sources[0]
    *_, question, answer = first.chosen.messages
    assert len(list(sources_of([question]))) == 1 and answer.content.isdigit() and first.chosen.prompt == 2


def test_a_picture_that_is_used_is_kept_once(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "kept")
    token = shelf.put(source(3))
    assert shelf.put(source(3)) == token >= PICTURE and not (tmp_path / "kept").exists()
    shelf.keep(token)
    shelf.keep(token)
    assert [f.name for f in (tmp_path / "kept").iterdir()] == [f"{token - PICTURE:08x}"]
    assert Shelf(tmp_path / "kept").content(token) == shelf.content(token)
    with pytest.raises(StoreError, match="on the shelf"):
        Shelf().content(token)


def test_pictures_with_one_number_get_two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Same:
        def digest(self) -> bytes:
            return b"\xff\xff\xff\xff"

    monkeypatch.setattr("kitae.data.pictures.hashlib.blake2b", lambda *_, **__: Same())
    shelf = Shelf()
    one, two = (shelf.put(source(seed)) for seed in (1, 2))
    assert one != two and shelf.put(source(1)) == one and min(one, two) >= PICTURE and max(one, two) < 2**31
    assert shelf.content(one) != shelf.content(two)
