"""Rows of every shape into examples, examples into the shapes that stages need, and the order of a stream."""

import json
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.data.config import ExamplesConfig
from kitae.data.examples import Conversation, Example, ExampleStream, held_out_examples, open_examples
from kitae.errors import DataError
from kitae.types import Message, ToolCall

HI, HELLO, GO = Message("user", "Hi"), Message("assistant", "Hello"), Message("assistant", "Go away")
SYSTEM = Message("system", "Be kind.")
TURN, REPLY, RUDE = ({"role": m.role, "content": m.content} for m in (HI, HELLO, GO))
FIRST = {"role": "system", "content": "Be kind."}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASKS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c0", "function": {"name": "add", "arguments": '{"a": 1}'}}],
}
SAYS = {"role": "tool", "content": "2", "tool_call_id": "c0", "name": "add"}


def write(path: Path, rows) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def read(tmp_path):
    """The example of one row, in the shape that its columns show."""

    def read_row(row, shape, suffix=".jsonl", **settings_):
        stream = open_examples(ExamplesConfig(path=write(tmp_path / f"f{suffix}", [row]), **settings_), 0, shape)
        assert stream.size == 1
        return stream.at(0)

    return read_row


class TestDemonstrations:
    @pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
    @pytest.mark.parametrize(
        ("row", "wanted"),
        [
            ({"text": "Once upon a time"}, Conversation(text="Once upon a time")),
            ({"prompt": "Hi", "completion": "Hello"}, Conversation((HI, HELLO), 1)),
            ({"prompt": [FIRST, TURN], "completion": [REPLY]}, Conversation((SYSTEM, HI, HELLO), 2)),
            ({"prompt": [TURN], "completion": "Hello"}, Conversation((HI, HELLO), 1)),
            ({"prompt": "Hi", "completion": REPLY}, Conversation((HI, HELLO), 1)),
            ({"messages": [TURN, REPLY, TURN, RUDE]}, Conversation((HI, HELLO, HI, GO))),
            ({"messages": [TURN, REPLY], "label": None, "text": None}, Conversation((HI, HELLO))),
        ],
    )
    def test_shapes(self, read, row, wanted, suffix):
        made = read(row, "demonstration", suffix)
        assert made == Example(f"f{suffix}:1", wanted)
        assert made.shape == "demonstration" and made.conversations == (wanted,)

    @pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
    @pytest.mark.parametrize("tools", [[ADD], [ADD["function"]], json.dumps([ADD])])
    def test_tools(self, read, tools, suffix):
        row = {"messages": [TURN, ASKS, SAYS, REPLY], "tools": tools}
        call = Message("assistant", "", (ToolCall("add", {"a": 1}, "c0"),))
        result = Message("tool", "2", call_id="c0", name="add")
        assert read(row, "demonstration", suffix).chosen == Conversation((HI, call, result, HELLO), 0, (ADD,))

    def test_columns_have_the_names_that_the_user_gives(self, read):
        row = {"q": "Hi", "a": "Hello", "prompt": 3}
        assert read(row, "demonstration", columns={"prompt": "q", "completion": "a"}).chosen == Conversation(
            (HI, HELLO), 1
        )

    def test_parts_of_text(self, read):
        parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
        made = read({"messages": [TURN, {"role": "assistant", "content": parts}]}, "demonstration")
        assert made.chosen.messages[1] == Message("assistant", parts=tuple(parts))

    def test_a_system_message_for_conversations_without_one(self, read):
        made = read({"prompt": "Hi", "completion": "Hello"}, "demonstration", system="Be kind.")
        assert made.chosen == Conversation((SYSTEM, HI, HELLO), 2)
        made = read({"messages": [{"role": "system", "content": "x"}, TURN, REPLY]}, "demonstration", system="Be kind.")
        assert made.chosen.messages[0].content == "x"
        assert read({"messages": [TURN, REPLY]}, "demonstration", system="Be kind.").chosen.prompt == 0


class TestPreferences:
    @pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
    @pytest.mark.parametrize(
        "row",
        [
            {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"},
            {"prompt": [TURN], "chosen": [REPLY], "rejected": [RUDE]},
            {"prompt": "Hi", "chosen": REPLY, "rejected": RUDE},
            {"prompt": "Hi", "chosen": [TURN, REPLY], "rejected": [TURN, RUDE]},
            {"chosen": [TURN, REPLY], "rejected": [TURN, RUDE]},
            {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: Go away"},
            {"chosen": "Human: Hi\n\nAssistant: Hello\n", "rejected": "\n\nHuman: Hi\n\nAssistant: Go away"},
        ],
    )
    def test_shapes(self, read, row, suffix):
        made = read(row, "preference", suffix)
        assert made == Example(f"f{suffix}:1", Conversation((HI, HELLO), 1), Conversation((HI, GO), 1))
        assert made.shape == "preference" and made.conversations == (made.chosen, made.rejected)

    def test_a_common_beginning_is_as_long_as_it_can_be(self, read):
        later = [TURN, REPLY, {"role": "user", "content": "Bye"}]
        made = read({"chosen": [*later, REPLY], "rejected": [*later, RUDE]}, "preference")
        assert made.chosen.prompt == made.rejected.prompt == 3

    def test_what_differs_begins_with_the_assistant(self, read):
        made = read(
            {
                "chosen": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: A?\n\nAssistant: B",
                "rejected": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: C?\n\nAssistant: D",
            },
            "preference",
        )
        assert made.chosen.prompt == made.rejected.prompt == 1

    def test_one_may_go_on_where_the_other_ends(self, read):
        made = read({"chosen": [TURN, REPLY, TURN, REPLY], "rejected": [TURN, REPLY]}, "preference")
        assert (made.chosen.prompt, len(made.rejected.messages)) == (1, 2)

    @pytest.mark.parametrize(
        ("columns", "margin"),
        [
            ({}, None),
            ({"margin": 1.5}, 1.5),
            ({"score_chosen": 8, "score_rejected": 5.5}, 2.5),
            ({"score_chosen": 8}, None),
        ],
    )
    def test_margins(self, read, columns, margin):
        assert read({"prompt": "Hi", "chosen": "a", "rejected": "b", **columns}, "preference").margin == margin

    def test_scores_of_other_names(self, read):
        row = {"prompt": "Hi", "chosen": "a", "rejected": "b", "good": 3, "bad": 1}
        assert read(row, "preference", columns={"scores": ("good", "bad")}).margin == 2

    def test_tools_are_those_of_both(self, read):
        made = read({"prompt": "Hi", "chosen": [ASKS], "rejected": "I cannot", "tools": [ADD]}, "preference")
        assert made.chosen.tools == made.rejected.tools == (ADD,) and made.chosen.messages[-1].calls


class TestLabels:
    @pytest.mark.parametrize("label", [True, False, 1, 0])
    @pytest.mark.parametrize("row", [{"prompt": "Hi", "completion": "Hello"}, {"messages": [TURN, REPLY]}])
    def test_shapes(self, read, row, label):
        made = read({**row, "label": label}, "labelled")
        assert made == Example("f.jsonl:1", Conversation((HI, HELLO), 1), label=bool(label))
        assert made.shape == "labelled" and type(made.label) is bool

    def test_what_answers_the_last_turn_of_the_user_is_judged(self, read):
        made = read({"messages": [TURN, REPLY, TURN, ASKS, SAYS, REPLY], "label": True}, "labelled")
        assert made.chosen.prompt == 3


class TestShapes:
    def rows(self, tmp_path, rows, shape, **settings_):
        stream = open_examples(
            ExamplesConfig(path=write(tmp_path / "f.jsonl", rows), shuffle=False, **settings_), 0, shape
        )
        return [stream.at(i) for i in range(stream.size)]

    def test_a_preference_is_two_labelled_answers(self, tmp_path):
        made = self.rows(tmp_path, [{"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"}], "labelled")
        assert made == [
            Example("f.jsonl:1/chosen", Conversation((HI, HELLO), 1), label=True),
            Example("f.jsonl:1/rejected", Conversation((HI, GO), 1), label=False),
        ]

    def test_a_preference_is_a_demonstration_of_the_better_answer(self, tmp_path):
        made = self.rows(
            tmp_path, [{"prompt": "Hi", "chosen": "Hello", "rejected": "Go", "margin": 1}], "demonstration"
        )
        assert made == [Example("f.jsonl:1", Conversation((HI, HELLO), 1))]

    def test_a_good_answer_is_a_demonstration(self, tmp_path):
        rows = [{"prompt": "Hi", "completion": c, "label": label} for c, label in (("Hello", True), ("Go", False))]
        assert [e.id for e in self.rows(tmp_path, rows, "demonstration")] == ["f.jsonl:1"]
        with pytest.raises(DataError, match="no row has the label true"):
            self.rows(tmp_path, rows[1:], "demonstration")

    @pytest.mark.parametrize(
        ("row", "shape"),
        [
            ({"prompt": "Hi", "completion": "Hello"}, "preference"),
            ({"prompt": "Hi", "completion": "Hello", "label": True}, "preference"),
            ({"messages": [TURN, REPLY]}, "labelled"),
            ({"text": "Hi"}, "labelled"),
        ],
    )
    def test_what_a_stage_cannot_use_is_named(self, tmp_path, row, shape):
        with pytest.raises(
            DataError, match=r"f.jsonl:1: this stage needs rows with .*, got a (demonstration|labelled answer)"
        ):
            self.rows(tmp_path, [row], shape)


BAD = [
    ({"a": 1}, "a row must have text; messages; .*it has 'a'\n"),
    ({"conversations": []}, "data.format='sharegpt'"),
    ({"instruction": "x", "output": "y"}, "data.format='alpaca'"),
    ({"text": " "}, "the text must be text and not empty"),
    ({"text": 3}, "the text must be text"),
    ({"prompt": "Hi", "completion": ""}, "the answer must be text and not empty"),
    ({"prompt": "", "completion": "x"}, "the prompt must be text and not empty"),
    ({"prompt": [TURN, REPLY], "completion": "x"}, "a prompt must end with a turn that the assistant answers"),
    (
        {"prompt": "Hi", "completion": [TURN, REPLY]},
        "an answer must begin with a turn of the assistant, got one of 'user'",
    ),
    ({"messages": []}, r"a conversation must be a list of messages, got \[\]"),
    ({"messages": "Hi"}, "a conversation must be a list of messages, got 'Hi'"),
    ({"messages": [TURN]}, "must end with a turn of the assistant, got one of 'user'"),
    ({"messages": [REPLY]}, "must begin with what the assistant answers"),
    ({"messages": [TURN, {"role": "Assistant", "content": "x"}]}, "got 'Assistant'; did you mean 'assistant'"),
    ({"messages": [{"from": "human", "value": "x"}]}, "data.format='sharegpt' reads messages with from and value"),
    ({"messages": [TURN, {"role": "assistant", "content": " "}]}, "must say something or call a tool"),
    ({"messages": [TURN, {"role": "assistant", "content": None}]}, "must be text or a list of parts, got None"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}, REPLY]}, "more pictures than their row has"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}, REPLY]}, "a part of a message must be text"),
    ({"messages": [{**TURN, "tool_calls": [{"name": "add"}]}, REPLY]}, "only an assistant calls tools"),
    ({"messages": [TURN, {**REPLY, "tool_calls": [{"arguments": {}}]}]}, "a tool call must have a name"),
    (
        {"messages": [TURN, {**REPLY, "tool_calls": [{"name": "f", "arguments": "{"}]}]},
        "arguments of tool call 'f' must be JSON",
    ),
    ({"messages": [TURN, REPLY], "tools": "[" * 100_000}, "nested too deeply"),
    ({"messages": [TURN, {**REPLY, "tool_calls": [{"name": "f", "arguments": [1]}]}]}, r"must be an object, got \[1\]"),
    ({"messages": [TURN, REPLY], "tools": "["}, "tools must be JSON"),
    ({"messages": [TURN, REPLY], "tools": [{"type": "function"}]}, "a tool must be a JSON schema"),
    ({"prompt": "Hi", "completion": "x", "label": "yes"}, "a label must be true or false, got 'yes'"),
    ({"label": True, "prompt": "x"}, "a row must have text; messages"),
    ({"chosen": "x", "rejected": "y"}, "without a prompt, chosen must be messages or text of the form"),
    ({"chosen": [TURN, REPLY], "rejected": [REPLY]}, "must begin with the same messages"),
    ({"chosen": [TURN, REPLY], "rejected": [{**TURN, "content": "?"}, REPLY]}, "must begin with the same messages"),
    ({"prompt": "Hi", "chosen": "x", "rejected": "x"}, "chosen and rejected must differ"),
    ({"prompt": "Hi", "chosen": "x", "rejected": "y", "margin": "big"}, "a margin must be a number, got 'big'"),
    ({"prompt": "Hi", "chosen": "x", "rejected": "y", "score_chosen": 1, "score_rejected": 2}, "got a margin of -1"),
    ({"text": "\ud800"}, "half a surrogate pair"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_bad_rows_are_named_by_file_and_line(tmp_path, row, message):
    good = {"prompt": "Hi", "chosen": "a", "rejected": "b"}
    path = write(tmp_path / "f.jsonl", [good, row, good])
    with pytest.raises(DataError, match=rf"f\.jsonl:2: (?s:.*){message}") as caught:
        open_examples(ExamplesConfig(path=path), 0, "demonstration")
    assert str(caught.value).endswith("1 of 3 rows are bad; data.skip_bad_rows=true leaves them out")
    stream = open_examples(ExamplesConfig(path=path, skip_bad_rows=True, shuffle=False), 0, "demonstration")
    assert [stream.at(i).id for i in range(2)] == ["f.jsonl:1", "f.jsonl:3"]
    assert stream.skipped.startswith("1 of 3 rows are left out (data.skip_bad_rows); the first: ")


class TestStreams:
    def numbered(self, path, count):
        return write(path, [{"text": f"{path.stem} {i}"} for i in range(count)])

    def test_epochs_of_one_file(self, tmp_path):
        stream = open_examples(ExamplesConfig(path=self.numbered(tmp_path / "a.jsonl", 20)), 3, "demonstration")
        epochs = [[stream.at(e * 20 + i).id for i in range(20)] for e in range(3)]
        assert all(len(set(epoch)) == 20 for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]

    def test_files_without_weights_are_one_file(self, tmp_path):
        paths = [self.numbered(tmp_path / f"{name}.jsonl", size) for name, size in (("a", 30), ("b", 3))]
        stream = open_examples(ExamplesConfig(mix=[{"path": p} for p in paths]), 0, "demonstration")
        assert stream.size == 33 and len({stream.at(i).id for i in range(33, 66)}) == 33

    def test_files_with_weights_take_turns_by_them(self, tmp_path):
        paths = [self.numbered(tmp_path / f"{name}.jsonl", size) for name, size in (("a", 70), ("b", 3))]
        mix = [{"path": paths[0], "weight": 1}, {"path": paths[1], "weight": 3}]
        stream = open_examples(ExamplesConfig(mix=mix), 0, "demonstration")
        assert stream.size == 73
        made = [stream.at(i) for i in range(2000)]
        by_file = {name: [e.id for e in made if e.id.startswith(name)] for name in "ab"}
        assert {name: len(ids) for name, ids in by_file.items()} == {"a": 500, "b": 1500}
        assert len(set(by_file["a"][70:140])) == 70, "each file has epochs of its own"
        assert Counter(by_file["b"]) == {f"b.jsonl:{i}": 500 for i in (1, 2, 3)}

    def test_formats_and_names_of_mixed_files(self, tmp_path):
        (tmp_path / "x").mkdir()
        here = write(tmp_path / "f.json", [{"instruction": "Hi", "output": "Hello"}])
        there = write(tmp_path / "x" / "f.json", [{"q": "Hi", "completion": "Hello"}])
        mix = [{"path": here, "format": "alpaca"}, {"path": there}]
        stream = open_examples(ExamplesConfig(mix=mix, shuffle=False, columns={"prompt": "q"}), 0, "demonstration")
        assert [stream.at(i).id for i in range(2)] == [f"{here}:1", f"{there}:1"]
        assert stream.at(0).chosen == stream.at(1).chosen == Conversation((HI, HELLO), 1)

    @settings(max_examples=30, deadline=None)
    @given(
        sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
        positions=st.lists(st.integers(0, 5000), min_size=1, max_size=20),
        weighted=st.booleans(),
    )
    def test_a_position_means_the_same_in_every_instance_and_order(self, sizes, positions, weighted):
        sources = [[Example(f"{s}:{i}", Conversation(text="x")) for i in range(n)] for s, n in enumerate(sizes)]
        weights = [float(s + 1) for s in range(len(sizes))] if weighted else None
        there, back = (ExampleStream(sources, seed=4, shuffle=True, weights=weights) for _ in range(2))
        forward = {p: there.at(p) for p in positions}
        assert all(back.at(p) == forward[p] for p in reversed(positions))

    def test_without_some(self, tmp_path):
        stream = open_examples(
            ExamplesConfig(path=self.numbered(tmp_path / "a.jsonl", 4), shuffle=False), 0, "demonstration"
        )
        fewer = stream.without({"a.jsonl:2"}, "are odd")
        assert [fewer.at(i).id for i in range(3)] == ["a.jsonl:1", "a.jsonl:3", "a.jsonl:4"]
        assert fewer.skipped == "1 of 4 examples are odd" and stream.without({"x"}, "are odd") is stream
        with pytest.raises(DataError, match="none is left of one: 4 of 4 examples are odd"):
            stream.without({f"a.jsonl:{i}" for i in range(1, 5)}, "are odd")


class TestHeldOut:
    def test_the_first_of_a_file_of_its_own(self, tmp_path):
        rows = [{"text": str(i)} for i in range(9)]
        paths = {key: write(tmp_path / f"{key}.jsonl", rows) for key in ("path", "eval_path")}
        config = ExamplesConfig(**paths)
        made = held_out_examples(config, 0, 4, "demonstration")
        assert len({e.id for e in made}) == 4 and all(e.id.startswith("eval_path.jsonl:") for e in made)
        assert held_out_examples(config, 0, 9, "demonstration")[:4] == made
        assert len(held_out_examples(config, 0, 100, "demonstration")) == 9
        assert held_out_examples(config, 0, 0, "demonstration") == []

    def test_not_the_file_to_train_on(self, tmp_path):
        path = write(tmp_path / "f.jsonl", [{"text": "x"}])
        for source in ({"path": path}, {"mix": [{"path": path}]}):
            with pytest.raises(DataError, match=r"data.eval_path must be another file"):
                held_out_examples(ExamplesConfig(**source, eval_path=path), 0, 1, "demonstration")
            with pytest.raises(DataError, match=r"set data.eval_path, or eval.examples to 0"):
                held_out_examples(ExamplesConfig(**source), 0, 1, "demonstration")

    def test_on_the_hub(self):
        with pytest.raises(DataError, match=r"set data.hub_eval_files"):
            held_out_examples(ExamplesConfig(hub="a/b"), 0, 1, "demonstration")


class TestSettings:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({}, "exactly one of path, mix, hub, task, got none"),
            ({"path": "a", "hub": "b/c"}, "got path and hub"),
            ({"mix": [{"path": "a", "weight": 1}, {"path": "b"}]}, "a weight for every file or for none"),
            ({"mix": [{"path": "a", "weight": 0}]}, "greater than 0"),
            ({"path": "a", "format": "alpaca", "columns": {"prompt": "q"}}, "remove data.columns.prompt"),
            ({"path": "a", "max_tokens": 1}, "greater than or equal to 2"),
        ],
    )
    def test_refused(self, values, message):
        with pytest.raises(ValueError, match=message):
            ExamplesConfig(**values)

    def test_saved_and_read_again(self):
        config = ExamplesConfig(mix=[{"path": "a", "weight": 2}], format="alpaca")
        assert ExamplesConfig.model_validate_json(config.model_dump_json()) == config


def test_nothing_but_bad_rows_cannot_be_left_out(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "Hi"}\n')
    config = ExamplesConfig(path=str(tmp_path / "bad.jsonl"), skip_bad_rows=True)
    with pytest.raises(DataError, match=r"1 of 1 rows are bad$"):
        open_examples(config, 0, "demonstration")
