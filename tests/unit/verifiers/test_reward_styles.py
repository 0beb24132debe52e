"""Reward functions of TRL, verl and OpenRLHF, called as they want to be called."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kitae.config.recipe import make_config
from kitae.config.root import RLConfig
from kitae.data.config import DataConfig
from kitae.data.prompt_stream import open_stream
from kitae.errors import ConfigError, VerifierError
from kitae.types import Score
from kitae.verifiers.pool import VerifierPool
from kitae.verifiers.reward_styles import prepare_openrlhf, prepare_trl, prepare_verl
from kitae.verifiers.score_calls import call_scores
from kitae.verifiers.verl_scores import score_by_source

TRL = """
import asyncio

SEEN = []

def right(prompts, completions, answer, **kwargs):
    SEEN.append((prompts, completions, sorted(kwargs)))
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [None if a is None else float(a in t) for t, a in zip(texts, answer)]

async def short(completions, log_extra, log_metric):
    await asyncio.sleep(0)
    log_metric("count", len(completions))
    log_extra("place", list(range(len(completions))))
    return [0.5] * len(completions)

def spread(completions, **kwargs):
    return [float(len(set(completions)))] * len(completions)

def ids(completions, completion_ids, **kwargs):
    return [float(len(tokens)) for tokens in completion_ids]

def state(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step)] * len(completions)

def few(completions, **kwargs):
    return [1.0]

class Always:
    __name__ = "always"

    def __call__(self, completions, **kwargs):
        return [1] * len(completions)

always = Always()
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    file = tmp_path / "rewards.py"
    file.write_text(TRL)
    return str(file)


def scores(verifier: Any, responses: list[str], reference: Any = "", **context: Any) -> list[Score]:
    return call_scores(verifier, responses, reference, [context] * len(responses), {})


def test_functions_of_trl_are_added_with_their_weights(rewards: str) -> None:
    made = prepare_trl({"function": [f"{rewards}:right", f"{rewards}:short"], "weights": [2.0, 1.0]})
    found = scores(made, ["it is 7", "8"], prompt="What?", answer="7")
    assert [s.value for s in found] == [2.5, 0.5]
    assert found[1].components == {"right": 0.0, "short": 0.5, "count": 2.0, "place": 1.0}


def test_none_of_trl_leaves_a_function_out(rewards: str) -> None:
    made = prepare_trl({"function": [f"{rewards}:right", f"{rewards}:short"]})
    (found,) = scores(made, ["7"], prompt="What?", answer=None)
    assert found.value == 0.5 and "right" not in found.components
    alone = scores(prepare_trl({"function": f"{rewards}:right"}), ["7"], prompt="What?", answer=None)
    assert not alone[0].valid, "no reward applies"


def test_a_function_of_trl_sees_the_whole_group(rewards: str) -> None:
    found = scores(prepare_trl({"function": f"{rewards}:spread"}), ["a", "b", "a"], prompt="What?")
    assert [s.value for s in found] == [2.0] * 3


def test_objects_and_tokens(rewards: str) -> None:
    assert scores(prepare_trl({"function": f"{rewards}:always"}), ["a"], prompt="?")[0].value == 1
    made = prepare_trl({"function": f"{rewards}:ids", "tokenizer": "tiny"})
    short, long = scores(made, ["a", "a b c d e f"], prompt="?")
    assert 0 < short.value < long.value
    assert "verifier.params.tokenizer" in scores(prepare_trl({"function": f"{rewards}:ids"}), ["a"])[0].detail


def test_conversations_come_as_messages(rewards: str, tmp_path: Path) -> None:
    """Where the prompt of the data is a list, completions are lists; columns of the row are handed on, ours are not."""
    (tmp_path / "see.py").write_text(
        "import json\ndef see(prompts, completions, **kwargs):\n"
        "    raise ValueError(json.dumps([prompts, completions, sorted(kwargs)]))\n"
    )
    made = prepare_trl({"function": f"{tmp_path}/see.py:see"})
    asked = [{"role": "user", "content": "2 + 2?"}]
    said = scores(made, ["4"], prompt=asked, question="2 + 2?", level=3, prompt_messages=asked)[0].detail
    prompts, completions, names = json.loads(said[said.index("[[") : said.rindex("]") + 1])
    assert prompts == [asked] and completions == [[{"role": "assistant", "content": "4"}]]
    assert {"level", "question", "trainer_state"} <= set(names) and "prompt_messages" not in names
    turns = [*asked, {"role": "assistant", "content": "call"}, {"role": "tool", "content": "4"},
             {"role": "assistant", "content": "4"}]  # fmt: skip
    said = scores(made, ["4"], prompt=asked, transcript=turns)[0].detail
    assert json.loads(said[said.index("[[") : said.rindex("]") + 1])[1] == [turns[1:]]


def test_what_a_verifier_does_not_know_is_said(rewards: str) -> None:
    (found,) = scores(prepare_trl({"function": f"{rewards}:state"}), ["a"], prompt="?")
    assert not found.valid and "trainer_state.global_step is not known" in found.detail
    two = scores(prepare_trl({"function": f"{rewards}:few"}), ["a", "b"], prompt="?")
    assert not two[0].valid and "must return one reward for each of 2 answers, got 1" in two[0].detail
    with pytest.raises(VerifierError, match="one for each of 1 functions, got 2"):
        prepare_trl({"function": f"{rewards}:few", "weights": [1, 2]})
    with pytest.raises(VerifierError, match="needs a function 'rigth'"):
        prepare_trl({"function": f"{rewards}:rigth"})


def test_compute_score_of_verl(tmp_path: Path) -> None:
    file = tmp_path / "score.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(ground_truth in solution_str), 'index': extra_info['index'], 'pred': 'x'}\n"
        "def plain(solution_str, ground_truth):\n    return ground_truth in solution_str\n"
        "async def waits(data_source, solution_str, ground_truth, extra_info, bonus=0):\n    return 1 + bonus\n"
    )
    (found,) = scores(prepare_verl({"function": f"{file}:compute_score"}), ["it is 7"], "7", extra_info={"index": 3})
    assert found.value == 1 and found.components == {"index": 3.0}
    assert scores(prepare_verl({"function": f"{file}:plain"}), ["8"], "7")[0].value == 0
    assert scores(prepare_verl({"function": f"{file}:waits", "arguments": {"bonus": 2}}), ["8"], "7")[0].value == 3


@pytest.mark.parametrize(
    ("source", "solution", "truth", "expected"),
    [
        ("openai/gsm8k", "so\n#### 1,234", "1234", 1.0),
        ("openai/gsm8k", "the answer is 1234", "1234", 0.0),
        ("openai/gsm8k", "#### 12" + " " * 300, "12", 0.0),
        ("HuggingFaceH4/MATH-500", r"So \boxed{\frac{1}{2}}.", r"\frac12", 1.0),
        ("HuggingFaceH4/MATH-500", "So 1/2.", r"\frac12", 0.0),
        ("math_dapo", "Answer: 12", "12", 1.0),
        ("aime2024", "Answer: 13", "12", -1.0),
    ],
)
def test_usual_scores_of_verl(source: str, solution: str, truth: str, expected: float) -> None:
    found = score_by_source(source, solution, truth)
    value = found["score"] if isinstance(found, dict) else getattr(found, "value", found)
    assert value == expected


def test_sources_without_a_usual_score_name_the_way_out() -> None:
    (found,) = scores(prepare_verl({}), ["x"], "y", data_source="mine")
    assert not found.valid and "verifier.style = 'verl'" in found.detail


def test_reward_func_of_openrlhf(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(
        "import torch\ndef reward_func(queries, prompts, labels):\n"
        "    said = [q[len(p):] for q, p in zip(queries, prompts)]\n"
        "    r = torch.tensor([float(l in s) for s, l in zip(said, labels)])\n"
        "    long = torch.tensor([float(len(s)) for s in said])\n"
        "    return {'rewards': r, 'scores': r / 2, 'extra_logs': {'long': long}}\n"
    )
    made = prepare_openrlhf({"function": f"{file}:reward_func", "tokenizer": "tiny"})
    right, wrong = scores(made, ["7!", "8"], "7", question="What is 7?")
    assert (right.value, wrong.value) == (1.0, 0.0), "the question has a 7, the query is cut after the prompt"
    assert right.components == {"long": 2.0, "score": 0.5}


def test_a_server_of_openrlhf() -> None:
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps({"rewards": [0.25] * len(asked[-1]["query"])}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        made = prepare_openrlhf({"function": f"http://127.0.0.1:{server.server_port}/get_reward"})
        found = scores(made, ["a", "b"], "7", question="Q ")
        assert [s.value for s in found] == [0.25, 0.25]
        assert asked == [{"query": ["Q a", "Q b"], "prompts": ["Q ", "Q "], "labels": ["7", "7"]}]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_style_is_a_setting(rewards: str) -> None:
    config = make_config({"data": {"task": "reverse"}, "verifier": {"name": f"{rewards}:right", "style": "trl"}})
    assert isinstance(config, RLConfig)
    assert config.verifier.name == "trl" and config.verifier.params == {"function": f"{rewards}:right"}
    assert make_config(config.given()) == config, "what is resolved resolves to itself"
    with pytest.raises(ConfigError, match=r"verifier.style 'verl' is of a reward function.*got 'math'"):
        make_config({"data": {"task": "reverse"}, "verifier": {"name": "math", "style": "verl"}})


def test_rows_of_trl_and_verl(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    ask = [{"role": "user", "content": "1 + 1?"}]
    file.write_text(json.dumps({"prompt": ask, "solution": "2", "level": 3}))
    prompt = open_stream(DataConfig(path=str(file), format="trl"), 0).at(0)
    assert prompt.reference == "2"
    assert prompt.context == {"question": "1 + 1?", "prompt": ask, "solution": "2", "level": 3}
    row = {"data_source": "openai/gsm8k", "prompt": ask, "reward_model": {"style": "rule", "ground_truth": "2"},
           "extra_info": {"index": 0}}  # fmt: skip
    file.write_text(json.dumps(row))
    prompt = open_stream(DataConfig(path=str(file), format="verl"), 0).at(0)
    assert prompt.reference == "2" and prompt.context["data_source"] == "openai/gsm8k"


def test_in_workers_and_beside_other_verifiers(rewards: str) -> None:
    """As the recipe of an import has it: a part of compose, in processes."""
    parts = [{"name": "trl", "params": {"function": f"{rewards}:right"}}, {"name": "exact", "weight": 0.5}]

    async def judge() -> list[Score]:
        async with VerifierPool("compose", {"parts": parts}, workers=1) as pool:
            return await pool.scores(["7", "8"], "7", [{"prompt": "?", "answer": "7"}] * 2)

    right, wrong = asyncio.run(judge())
    assert (right.value, wrong.value) == (1.5, 0.0)
    assert right.components == {"trl": 1.0, "trl/right": 1.0, "exact": 1.0}
