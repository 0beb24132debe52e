"""Settings of what the model talks to."""

from pydantic import Field, JsonValue

from kitae.section import Section


class EnvConfig(Section):
    """What an episode is: one question and one answer, or a conversation with tools, a game or a program."""

    name: str = Field(
        "single",
        description="single: one question, one answer; see docs/agents.md, or your own: file.py:Class.",
    )
    command: str = Field(
        "", description="An agent program that is run for each episode, with name = 'command': python agent.py."
    )
    params: dict[str, JsonValue] = Field(default_factory=dict, description="Options of the environment.")
    turns: int = Field(8, ge=1, description="Turns of the model in one episode, at most.")
    tokens: int = Field(2048, ge=1, description="Tokens of one observation, at most; a longer one is an error.")
    seconds: float = Field(60.0, gt=0, description="Seconds for each call of the environment.")
