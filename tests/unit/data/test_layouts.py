"""Foreign layouts as rows that Kitae reads."""

import json

import pytest

from kitae.data.config import ExamplesConfig
from kitae.data.examples import Conversation, open_examples
from kitae.data.layouts import find_layout, lay_out
from kitae.errors import DataError
from kitae.types import Message, ToolCall

HI, HELLO = Message("user", "Hi"), Message("assistant", "Hello")
HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}
RUDE = {"from": "gpt", "value": "Go away"}


def read(tmp_path, row, shape="demonstration", format="sharegpt"):
    path = tmp_path / "f.json"
    path.write_text(json.dumps([row]))
    stream = open_examples(ExamplesConfig(path=str(path), format=format), 0, shape)
    return stream.at(0)


class TestAlpaca:
    def test_instruction_and_input(self, tmp_path):
        row = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
        wanted = Conversation((Message("user", "Add.\n\n1 and 2"), Message("assistant", "3")), 1)
        assert read(tmp_path, row, format="alpaca").chosen == wanted
        assert read(tmp_path, {**row, "input": ""}, format="alpaca").chosen.messages[0].content == "Add."

    def test_system_and_history(self, tmp_path):
        row = {"instruction": "Bye", "output": "Ciao", "system": "S", "history": [["Hi", "Hello"]]}
        made = read(tmp_path, row, format="alpaca").chosen
        assert [m.content for m in made.messages] == ["S", "Hi", "Hello", "Bye", "Ciao"] and made.prompt == 4

    def test_preferences_and_labels(self, tmp_path):
        made = read(tmp_path, {"instruction": "Hi", "chosen": "Hello", "rejected": "Go"}, "preference", "alpaca")
        assert made.chosen == Conversation((HI, HELLO), 1) and made.rejected is not None
        made = read(tmp_path, {"instruction": "Hi", "output": "Hello", "kto_tag": False}, "labelled", "alpaca")
        assert made.label is False

    def test_bad_rows(self, tmp_path):
        with pytest.raises(DataError, match=r"f.json:1: no column 'output'; the row has 'instruction'"):
            read(tmp_path, {"instruction": "Hi"}, format="alpaca")
        with pytest.raises(DataError, match="must have an instruction or an input, got neither"):
            read(tmp_path, {"instruction": "", "output": "x"}, format="alpaca")


class TestSharegpt:
    def test_turns(self, tmp_path):
        assert read(tmp_path, {"conversations": [HUMAN, GPT]}).chosen == Conversation((HI, HELLO))
        system = read(tmp_path, {"conversations": [HUMAN, GPT], "system": "S"}).chosen.messages[0]
        assert system == Message("system", "S")

    def test_calls_of_tools(self, tmp_path):
        tool = {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}
        calls = [{"name": "find", "arguments": {"what": ["rice"]}}, {"name": "find", "arguments": '{"what": []}'}]
        for value, wanted in ((calls[0], calls[:1]), (calls, calls)):
            row = {
                "conversations": [
                    HUMAN,
                    {"from": "function_call", "value": json.dumps(value)},
                    {"from": "observation", "value": "[]"},
                    GPT,
                ],
                "tools": json.dumps([tool]),
            }
            made = read(tmp_path, row).chosen
            arguments = [{"what": ["rice"]}, {"what": []}]
            called = tuple(ToolCall("find", a) for a, _ in zip(arguments, wanted, strict=False))
            assert made.messages == (HI, Message("assistant", "", called), Message("tool", "[]"), HELLO)
            assert made.tools == ({"type": "function", "function": tool},)

    @pytest.mark.parametrize("tools", ["", "[]", None])
    def test_no_tools(self, tmp_path, tools):
        assert read(tmp_path, {"conversations": [HUMAN, GPT], "tools": tools}).chosen.tools == ()

    def test_preferences_and_labels(self, tmp_path):
        made = read(tmp_path, {"conversations": [HUMAN], "chosen": GPT, "rejected": RUDE}, "preference")
        assert made.chosen == Conversation((HI, HELLO), 1)
        made = read(tmp_path, {"conversations": [HUMAN, GPT], "label": True}, "labelled")
        assert made.chosen == Conversation((HI, HELLO), 1) and made.label is True

    @pytest.mark.parametrize(
        ("turn", "message"),
        [
            ({"from": "robot", "value": "x"}, "must be from one of system, human, .*'robot'"),
            ("x", "must be from one of"),
            ({"from": "function_call", "value": "{"}, "a function_call must be JSON"),
            ({"from": "function_call", "value": {}}, "must be JSON in a text"),
        ],
    )
    def test_bad_turns(self, tmp_path, turn, message):
        with pytest.raises(DataError, match=f"f.json:1: .*{message}"):
            read(tmp_path, {"conversations": [HUMAN, turn, GPT]})


class TestOwn:
    def function(self, tmp_path, body):
        file = tmp_path / "own.py"
        file.write_text(f"def layout(row):\n    {body}\n")
        return f"{file}:layout"

    def test_a_function_from_row_to_columns(self, tmp_path):
        name = self.function(tmp_path, "return {'prompt': row['q'], 'chosen': row['a'][0], 'rejected': row['a'][1]}")
        made = read(tmp_path, {"q": "Hi", "a": ["Hello", "Go"]}, "preference", name)
        assert made.chosen == Conversation((HI, HELLO), 1)
        with pytest.raises(DataError, match="no column 'q'; the row has 'a'"):
            read(tmp_path, {"a": 1}, "preference", name)

    def test_what_it_gets_wrong(self, tmp_path):
        with pytest.raises(DataError, match="must return a mapping of columns, got 3"):
            lay_out(find_layout(self.function(tmp_path, "return 3")), {})
        with pytest.raises(DataError, match="cannot read the row: ZeroDivisionError"):
            lay_out(lambda row: 1 / 0, {})

    def test_unknown_names(self):
        with pytest.raises(
            DataError, match=r"must be one of alpaca, sharegpt or file.py:function, got 'alpacca'; did you mean"
        ):
            find_layout("alpacca")
