"""Agents of other people's frameworks, not changed for training, asked through the endpoint of an episode.

The policy's answers are written down, with spaces and orders of keys that frameworks like to tidy up.
"""

import pytest
from captured import capture

CALL = '<tool_call>{"name": "add", "arguments": {"b": 3, "a": 2}}</tool_call>'
ANSWERS = (f"I add them.\n{CALL}", " It is 5.\n", "Yes,  quite sure.\n\n")


@pytest.mark.parametrize("environment", ["openai-2", "openai-3"])
def test_openai(environment: str) -> None:
    captured = capture(environment, "openai_agent.py", ANSWERS)
    captured.check(chains=1)
    captured.check_as_native()


def test_openai_agents() -> None:
    captured = capture("openai-agents", "openai_agents_agent.py", ANSWERS)
    captured.check(chains=1)
    captured.check_as_native()


def test_langgraph() -> None:
    captured = capture("langgraph", "langgraph_agent.py", ANSWERS)
    captured.check(chains=1)
    captured.check_as_native()
