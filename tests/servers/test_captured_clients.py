"""Agents of other people's frameworks, not changed for training, asked through the endpoint of an episode.

The policy's answers are written down, with spaces and orders of keys that frameworks like to tidy up.
"""

import json

import pytest
from captured import capture

CALL = '<tool_call>{"name": "add", "arguments": {"b": 3, "a": 2}}</tool_call>'
ANSWERS = (f"I add them.\n{CALL}", " It is 5.\n", "Yes,  quite sure.\n\n")


@pytest.mark.parametrize("environment", ["openai-2", "openai-3"])
def test_openai(environment: str) -> None:
    captured = capture(environment, "openai_agent.py", ANSWERS)
    captured.check(chains=1)
    captured.check_as_native()


TWICE = (f"I add them.\n{CALL}\n{CALL.replace('3', '4')}", " It is 5.\n", "Yes,  quite sure.\n\n")


@pytest.mark.parametrize("answers", [ANSWERS, TWICE], ids=["one-call", "two-calls"])
@pytest.mark.parametrize(
    ("environment", "script"),
    [
        ("openai-3", "responses_agent.py"),
        ("anthropic", "anthropic_agent.py"),
        ("openai-agents", "openai_agents_agent.py"),
        ("langgraph", "langgraph_agent.py"),
    ],
)
def test_an_agent_is_one_chain(environment: str, script: str, answers: tuple[str, ...]) -> None:
    """Each of `examples/agents`, with calls one at a time and two at once."""
    captured = capture(environment, script, answers)
    captured.check(chains=1)
    captured.check_as_native()
    assert [m.role for m in captured.asks[-1].messages].count("tool") == answers[0].count(CALL[:11])


def test_smolagents_rewrites_each_step() -> None:
    """It sends a call back as text, so each step is a chain of its own."""
    final = '<tool_call>{"name": "final_answer", "arguments": {"answer": "5"}}</tool_call>'
    captured = capture("smolagents", "smolagents_tools_agent.py", (ANSWERS[0], final))
    captured.check(chains=2)
    assert captured.asks[0].sampling.stop_strings == ("Observation:", "Calling tools:")


def test_smolagents_writes_code() -> None:
    answers = ("Thought: I add.\n<code>\nprint(2 + 3)\n</code>", 'Thought: done.\n<code>\nfinal_answer("5")\n</code>')
    captured = capture("smolagents", "smolagents_code_agent.py", answers)
    captured.check(chains=2)


def test_smolagents_tells_a_model_off_that_calls_no_tool() -> None:
    """`tool_choice = "required"` does not force the policy: its answer is told as it is."""
    final = '<tool_call>{"name": "final_answer", "arguments": {"answer": "5"}}</tool_call>'
    captured = capture("smolagents", "smolagents_tools_agent.py", ("It is five.", final))
    captured.check(chains=1)
    captured.check_as_native()


def test_mini_swe_agent() -> None:
    def bash(command: str) -> str:
        return f"Next.\n<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"

    answers = (
        bash("echo hi > note"),
        "What now?",
        bash("cat note"),
        bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    )
    captured = capture("mini-swe-agent", "mini_swe_agent.py", answers, question="Write a note.")
    captured.check(chains=2)
    assert "hi" in captured.asks[-1].messages[-1].content
