"""Whether what a client sends back is what it was told: small changes that mean nothing are none."""

import pytest

from kitae.data.chat import Chat
from kitae.envs.conversations import Conversations
from kitae.models.tiny import make_tokenizer
from kitae.types import Message, Segment, ToolCall

CHAT = Chat(make_tokenizer())
ASKED = (Message("system", "Be brief. "), Message("user", " 2 + 2"))
CALL = ToolCall("add", {"a": 2, "b": {"c": [1, None]}}, "call_1")
SAID = Message("assistant", " I add.\n\n", (CALL,))
RESULT = Message("tool", "4", call_id="call_1")


def chains(*messages: Message) -> int:
    """How many there are when a conversation goes on with these messages."""
    conversations = Conversations(CHAT)
    tokens = (*CHAT.encode(SAID.content), CHAT.stop_tokens[0])
    first = conversations.find(ASKED, ())
    conversations.grow(first, Segment("model", tokens, (-1.0,) * len(tokens), (0,) * len(tokens)), SAID)
    second = conversations.find(messages, ())
    conversations.grow(second, Segment("model", (5,), (-1.0,), (0,)), Message("assistant", "x"))
    return len(conversations.chains)


@pytest.mark.parametrize(
    "said",
    [
        SAID,
        Message("assistant", "I add.", (CALL,)),
        Message("assistant", "I add.", (ToolCall("add", {"b": {"c": [1, None]}, "a": 2}, "other"),)),
        Message("assistant", "", (CALL,), parts=({"type": "text", "text": " I add.\n"},)),
    ],
)
def test_what_means_the_same_goes_on(said: Message) -> None:
    assert chains(*ASKED, said, RESULT) == 1


@pytest.mark.parametrize(
    "messages",
    [
        (*ASKED, Message("assistant", "I  add.", (CALL,)), RESULT),
        (*ASKED, Message("assistant", "I add."), RESULT),
        (*ASKED, Message("assistant", "I add.", (ToolCall("add", {"a": 2, "b": {"c": [1]}}),)), RESULT),
        (*ASKED, Message("assistant", "I add.", (ToolCall("sub", CALL.arguments),)), RESULT),
        (ASKED[0], Message("user", "2 + 2"), SAID, RESULT),
        (ASKED[1], SAID, RESULT),
    ],
)
def test_what_does_not_is_another_chain(messages: tuple[Message, ...]) -> None:
    assert chains(*messages) == 2
