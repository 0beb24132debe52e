import json
import os
import subprocess
import sys
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from importlib.resources import files
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.data.config import DataConfig
from kitae.data.prompt_stream import PromptStream, eval_prompts, open_stream
from kitae.errors import DataError
from kitae.types import Message, Prompt

WORD_PROBLEMS = str(files("kitae.data") / "shipped" / "word_problems.jsonl")


def write(path: Path, rows) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(count, start=0):
    return [{"question": f"q{i}", "answer": f"a{i}"} for i in range(start, start + count)]


def fake_stream(size, seed=0, shuffle=True):
    return PromptStream(lambda i: Prompt(str(i), (), i), size, seed=seed, shuffle=shuffle)


class TestStream:
    @given(size=st.integers(1, 60), seed=st.integers(0, 2**63), epoch=st.integers(0, 5))
    def test_every_epoch_is_a_permutation(self, size, seed, epoch):
        stream = fake_stream(size, seed)
        visited = [stream.at(epoch * size + i).reference for i in range(size)]
        assert sorted(visited) == list(range(size))

    @settings(max_examples=50)
    @given(positions=st.lists(st.integers(0, 10**6), min_size=1, max_size=30))
    def test_a_position_means_the_same_in_every_instance_and_order(self, positions):
        there, back = fake_stream(37), fake_stream(37)
        forward = {p: there.at(p) for p in positions}
        assert all(back.at(p) == forward[p] for p in reversed(positions))

    def test_epochs_and_seeds_have_orders_of_their_own(self):
        stream, other = fake_stream(50), fake_stream(50, seed=1)
        epochs = [[s.at(e * 50 + i).reference for i in range(50)] for s in (stream, other) for e in range(3)]
        assert len({tuple(order) for order in epochs}) == 6

    def test_order_is_fixed_for_good(self):
        assert [fake_stream(8).at(i).reference for i in range(16)] == [
            *(3, 2, 1, 6, 0, 7, 4, 5),
            *(7, 4, 5, 1, 6, 2, 0, 3),
        ]

    def test_without_shuffle_the_rows_come_in_order(self):
        assert [fake_stream(3, shuffle=False).at(i).reference for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]


class TestGenerated:
    def test_position_is_the_index(self):
        config = DataConfig(task="reverse", params={"count": 4})
        stream = open_stream(config, seed=5)
        assert stream.size is None
        prompt = stream.at(10**9)
        assert prompt.id == "reverse/train/1000000000"
        assert prompt == open_stream(config, seed=5).at(10**9)
        assert prompt != open_stream(config, seed=6).at(10**9)

    def test_eval_prompts_are_different_and_unseen(self):
        config = DataConfig(task="sort")
        held_out = eval_prompts(config, 0, 64)
        assert [p.id for p in held_out[:2]] == ["sort/eval/0", "sort/eval/1"]
        assert len({p.messages for p in held_out}) == 64
        stream = open_stream(config, 0)
        assert not {p.messages for p in held_out} & {stream.at(i).messages for i in range(1000)}

    def test_system_and_instruction_reach_every_turn(self):
        config = DataConfig(task="reverse", system="Be brief.", instruction="Task: {question}!")
        messages = open_stream(config, 0).at(0).messages
        assert messages[0] == Message("system", "Be brief.")
        questions = [m.content for m in messages if m.role == "user"]
        assert len(questions) == 3 and all(q.startswith("Task: Reverse ") and q.endswith("!") for q in questions)

    def test_mistakes_are_found_on_opening(self):
        for params in ({"count": 0}, {"low": 9, "high": 5}):
            with pytest.raises(DataError, match="nearest valid"):
                open_stream(DataConfig(task="reverse", params=params), 0)
        with pytest.raises(DataError, match="did you mean 'sort'"):
            open_stream(DataConfig(task="sorte"), 0)


class TestFiles:
    @pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
    def test_rows(self, tmp_path, name):
        path = write(tmp_path / name, [{**row, "level": 2} for row in numbered(10)])
        stream = open_stream(DataConfig(path=path, shuffle=False), 0)
        assert stream.size == 10
        assert stream.at(3) == Prompt(f"{name}:4", (Message("user", "q3"),), "a3", {"question": "q3", "level": 2})
        assert stream.at(13) == stream.at(3)
        shuffled = open_stream(DataConfig(path=path), 0)
        assert {shuffled.at(i).id for i in range(10)} == {f"{name}:{i + 1}" for i in range(10)}

    def test_ids_are_line_numbers_whatever_is_blank(self, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_text(
            '\ufeff{"question": "caf\u00e9\\u2028", "answer": 1}\n\n  \n{"question": "q", "answer": 2}', "utf-8"
        )
        stream = open_stream(DataConfig(path=str(path), shuffle=False), 0)
        assert [stream.at(i).id for i in range(2)] == ["a.jsonl:1", "a.jsonl:4"]
        assert stream.at(0).messages[0].content == "café\u2028"

    @pytest.mark.parametrize("reference", ["1,234", 7, 0.5, True, ["a", 1], {"tests": ["x"]}])
    def test_references_are_kept_as_they_are(self, tmp_path, reference):
        path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": reference}])
        assert open_stream(DataConfig(path=path), 0).at(0).reference == reference

    def test_a_reference_that_is_null_is_refused_by_name(self, tmp_path):
        path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "a"}, {"question": "q", "answer": None}])
        with pytest.raises(DataError, match=r"a.jsonl:2: the reference answer is null, in the column 'answer'"):
            open_stream(DataConfig(path=path), 0)
        none = DataConfig(path=path, columns={"answer": ""})
        assert open_stream(none, 0).at(0).reference is None

    def test_templates_take_any_text(self, tmp_path):
        path = write(tmp_path / "a.jsonl", [{"question": "f{x} {question}", "answer": ""}])
        config = DataConfig(path=path, system="S", instruction="{question}\nThink. {y}")
        messages = open_stream(config, 0).at(0).messages
        assert messages == (Message("system", "S"), Message("user", "f{x} {question}\nThink. {y}"))

    @pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
    def test_chats_are_used_as_they_are(self, tmp_path, name):
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
        last = {"role": "user", "content": "go"}
        rows = [
            {"chat": [*turns, last], "answer": "1"},
            {"chat": [{"role": "system", "content": "own"}, last], "answer": "1"},
        ]
        config = DataConfig(
            path=write(tmp_path / name, rows),
            columns={"prompt": "chat"},
            system="S",
            instruction="!{question}",
            shuffle=False,
        )
        stream = open_stream(config, 0)
        first, second = ([(m.role, m.content) for m in stream.at(i).messages] for i in range(2))
        assert first == [("system", "S"), ("user", "hi"), ("assistant", "yes"), ("user", "go")]
        assert second == [("system", "own"), ("user", "go")]

    def test_shipped_word_problems(self):
        stream = open_stream(DataConfig(path=WORD_PROBLEMS, answer_after="####", shuffle=False), 0)
        assert stream.size == 20
        references = [stream.at(i).reference for i in range(20)]
        assert references[0] == "228" and "3,000" in references and "-4" in references
        assert all(int(r.replace(",", "")) is not None for r in references)
        assert len({stream.at(i).messages for i in range(20)}) == 20

    def test_only_the_last_mark_counts(self, tmp_path):
        path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "#### 1 #### \n 2 "}])
        assert open_stream(DataConfig(path=path, answer_after="####"), 0).at(0).reference == "2"


class TestHeldOut:
    def test_seeded_choice_of_the_file(self, tmp_path):
        config = DataConfig(path="unused.jsonl", eval_path=write(tmp_path / "test.jsonl", numbered(50)))
        chosen = eval_prompts(config, 0, 20)
        assert len({p.id for p in chosen}) == 20
        assert eval_prompts(config, 0, 20) == chosen
        assert eval_prompts(config, 0, 10) == chosen[:10]
        assert len(eval_prompts(config, 0, 99)) == 50

    def test_a_file_may_judge_a_generated_task(self, tmp_path):
        config = DataConfig(task="reverse", eval_path=write(tmp_path / "test.jsonl", numbered(3)))
        assert {p.reference for p in eval_prompts(config, 0, 3)} == {"a0", "a1", "a2"}

    def test_missing_source_names_the_key(self):
        with pytest.raises(DataError, match=r"no held-out prompts for a\.jsonl: set data\.eval_path"):
            eval_prompts(DataConfig(path="a.jsonl"), 0, 4)
        with pytest.raises(DataError, match=r"no held-out prompts for org/name: set data\.hub_eval_files"):
            eval_prompts(DataConfig(hub="org/name", hub_eval_files=None), 0, 4)
        assert eval_prompts(DataConfig(path="a.jsonl"), 0, 0) == []

    def test_training_data_is_not_held_out(self, tmp_path):
        path = write(tmp_path / "a.jsonl", numbered(3))
        with pytest.raises(DataError, match=r"data\.eval_path must be another file than data\.path"):
            eval_prompts(DataConfig(path=path, eval_path=str(tmp_path / "." / "a.jsonl")), 0, 3)


@pytest.mark.parametrize(
    ("name", "content", "settings", "message"),
    [
        ("a.jsonl", "", {}, "a.jsonl: no rows"),
        ("a.jsonl", "\n\n", {}, "a.jsonl: no rows"),
        (
            "a.jsonl",
            '{"question": "q", "answer": 1}\n{"question": \n',
            {},
            "a.jsonl:2: not valid JSON: Expecting",
        ),
        ("a.jsonl", "[1, 2]\n", {}, "a.jsonl:1: a row must be a JSON object, got [1, 2]"),
        ("a.jsonl", b'{"question": "\xff"}\n', {}, "a.jsonl: 'utf-8' codec can't decode"),
        (
            "a.jsonl",
            '\n{"q": "x", "a": 1}\n',
            {},
            "a.jsonl:2: no column 'question', as data.columns.prompt has it; the row has 'q', 'a'",
        ),
        (
            "a.jsonl",
            '{"question": "x", "a": 1}\n',
            {},
            "a.jsonl:1: no column 'answer', as data.columns.answer has it; the row has 'question', 'a'",
        ),
        ("a.jsonl", '{"question": 7, "answer": 1}\n', {}, "a question must be text or a list of messages, got 7"),
        ("a.jsonl", '{"question": [], "answer": 1}\n', {}, "a question must be text or a list of messages, got []"),
        ("a.jsonl", '{"question": ["x"], "answer": 1}\n', {}, "must have a role and a content, both text, got 'x'"),
        (
            "a.jsonl",
            '{"question": [{"role": "user", "content": null}], "answer": 1}\n',
            {},
            "a.jsonl:1: a message must have a role and a content, both text, got {'role': 'user'",
        ),
        (
            "a.jsonl",
            '{"question": [{"role": "assistant", "content": "x"}], "answer": 1}\n',
            {},
            "must end with a turn that the model answers",
        ),
        (
            "a.jsonl",
            '{"question": "q", "answer": "no mark"}\n',
            {"answer_after": "####"},
            "a.jsonl:1: 'answer' must have text after '####' (data.answer_after), got 'no mark'",
        ),
        (
            "a.jsonl",
            '{"question": "q", "answer": "1 #### "}\n',
            {"answer_after": "####"},
            "must have text after '####'",
        ),
        ("a.jsonl", '{"question": "q", "answer": 4}\n', {"answer_after": "####"}, "must be text for data.answer_after"),
        ("a.txt", "q,a\n", {}, "a data file must end in .jsonl or .json or .parquet or .csv or .tsv, got"),
        ("a.csv", "question,a\nx,1\n", {}, "a.csv:2: no column 'answer', as data.columns.answer has it"),
        ("a.parquet", "PAR1 but not really", {}, "cannot read"),
    ],
)
def test_bad_files(tmp_path, name, content, settings, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        open_stream(DataConfig(path=str(path), **settings), 0)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_files(tmp_path):
    with pytest.raises(DataError, match=r"data\.path must name a file, got nowhere\.jsonl, but nothing is there"):
        open_stream(DataConfig(path="nowhere.jsonl"), 0)
    with pytest.raises(DataError, match=r"data\.eval_path must name a file, got .*, but a folder is there"):
        eval_prompts(DataConfig(path="a.jsonl", eval_path=str(tmp_path)), 0, 1)


def test_the_last_of_many_rows_is_checked_on_opening(tmp_path):
    path = write(tmp_path / "a.jsonl", [*numbered(500), {"question": "q"}])
    with pytest.raises(DataError, match=r"a\.jsonl:501: no column 'answer', as data.columns.answer has it"):
        open_stream(DataConfig(path=path), 0)


def test_a_parquet_file_without_the_column(tmp_path):
    path = write(tmp_path / "a.parquet", [{"problem": "p", "answer": "a"}])
    with pytest.raises(
        DataError,
        match=r"a\.parquet:1: no column 'question', as data.columns.prompt has it; the row has 'problem', 'answer'",
    ):
        open_stream(DataConfig(path=path), 0)


def fill_cache(cache: Path) -> None:
    repo, commit = cache / "datasets--org--name", "0123456789abcdef0123456789abcdef01234567"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    folder = repo / "snapshots" / commit
    write(folder / "main" / "train-00001-of-00002.parquet", numbered(3, start=3))
    write(folder / "main" / "train-00000-of-00002.parquet", numbered(3))
    write(folder / "main" / "test-00000-of-00001.parquet", numbered(4, start=100))
    write(folder / "extra" / "train-more.jsonl", numbered(2, start=6))


class TestHub:
    @pytest.fixture(autouse=True)
    def offline(self, tmp_path, monkeypatch):
        fill_cache(tmp_path)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def test_files_are_read_in_order(self):
        stream = open_stream(DataConfig(hub="org/name", shuffle=False), 0)
        assert [stream.at(i).reference for i in range(7)] == ["a0", "a1", "a2", "a3", "a4", "a5", "a0"]
        assert stream.at(4).id == "main/train-00001-of-00002.parquet:2"

    def test_jsonl_and_folders_match_too(self):
        stream = open_stream(DataConfig(hub="org/name", hub_files="*train-*"), 0)
        assert stream.size == 8
        assert len({stream.at(i).id for i in range(8)}) == 8

    def test_held_out_files(self):
        prompts = eval_prompts(DataConfig(hub="org/name"), 0, 64)
        assert {p.reference for p in prompts} == {"a100", "a101", "a102", "a103"}

    def test_held_out_files_are_not_trained_on(self):
        config = DataConfig(hub="org/name", hub_files="main/*", hub_eval_files="main/test-*")
        with pytest.raises(DataError, match=r"both match main/test-00000-of-00001\.parquet"):
            eval_prompts(config, 0, 4)

    def test_no_match_lists_what_is_there(self):
        with pytest.raises(DataError, match=r"'org/name' has no file that matches 'x/\*'; in the cache are 'extra"):
            open_stream(DataConfig(hub="org/name", hub_files="x/*"), 0)

    @pytest.mark.parametrize("name", ["org/other", "not an id"])
    def test_failure_names_the_id_and_the_way_out(self, name):
        with pytest.raises(DataError, match=rf"cannot get data set '{name}' from the hub: .*\n.*copy the hub cache"):
            open_stream(DataConfig(hub=name), 0)


def test_a_new_process_needs_only_the_cache_and_no_torch(tmp_path):
    fill_cache(tmp_path)
    program = (
        "import sys; from kitae.data.config import DataConfig\n"
        "from kitae.data.prompt_stream import eval_prompts, open_stream\n"
        "assert not {'torch', 'transformers', 'pyarrow', 'huggingface_hub'} & set(sys.modules)\n"
        "config = DataConfig(hub='org/name')\n"
        "print([open_stream(config, 7).at(i).reference for i in range(12)])"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path), "PYTHONHASHSEED": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    ).stdout
    local = open_stream(DataConfig(path=write(tmp_path / "same.jsonl", numbered(6))), 7)
    assert printed.strip() == str([local.at(i).reference for i in range(12)])


def test_columns_that_json_does_not_know_become_text(tmp_path):
    """The journal keeps the context as JSON; an unrelated column must not end the run when its prompt is issued."""
    row = numbered(1)[0] | {
        "when": datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        "day": date(2026, 1, 2),
        "took": timedelta(seconds=90),
        "price": Decimal("1.50"),
        "picture": b"\x89PNG",
        "nested": [{"at": time(12, 30)}],
    }
    prompt = open_stream(DataConfig(path=write(tmp_path / "a.parquet", [row])), 0).at(0)
    context = dict(prompt.context)
    assert json.loads(json.dumps(context)) == context
    assert context["when"] == "2026-01-02T03:04:00+00:00" and context["day"] == "2026-01-02"
    assert context["price"] == "1.50" and context["picture"] == "(4 bytes)"
    assert context["nested"] == [{"at": "12:30:00"}]


@pytest.mark.parametrize(
    "odd",
    [
        {"question": "half \ud83d a pair"},
        {"question": [{"role": "user", "content": "\udc00"}]},
        {"answer": "\udc00"},
        {"source": ["\udc00"]},
    ],
)
def test_a_row_that_is_no_unicode_is_refused_on_opening(tmp_path, odd):
    path = write(tmp_path / "a.jsonl", [*numbered(2), {"question": "q", "answer": "a", **odd}])
    with pytest.raises(DataError, match=r"a\.jsonl:3: a row must be valid Unicode, got half a surrogate pair"):
        open_stream(DataConfig(path=path), 0)
    assert open_stream(DataConfig(path=path, skip_bad_rows=True), 0).size == 2


def test_lines_that_are_no_json_are_bad_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n{"question": \n{"question": "q"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not valid JSON: .* at column 14\n2 of 3 rows are bad"):
        open_stream(DataConfig(path=str(path)), 0)
    stream = open_stream(DataConfig(path=str(path), skip_bad_rows=True), 0)
    assert stream.size == 1 and "2 of 3 rows are left out (data.skip_bad_rows); the first: " in stream.skipped
