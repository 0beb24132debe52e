"""The process in which a reward model runs, so that neither its work nor a crash affects the run.

The other end is a `kitae.workers.templates.model_process.ModelProcess`.

    setup  {"path", "device", "dtype", "threads"}               greeting  {}
    job    {"talks": [{"messages": […], "response": "…"}, …]}   answer    {"results": [{"score"} or {"error"}, …]}

Messages are as in OpenAI's API. A job is a batch of any size; each of its conversations gets a score or the reason why
it has none. The caller (a verifier, a server) collects batches.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kitae.data.chat import Chat, longest_token
from kitae.data.messages import read_messages
from kitae.errors import DataError
from kitae.models.config import ModelConfig
from kitae.models.load import forked
from kitae.types import Message
from kitae.workers.templates.template_main import Answer, serve

if TYPE_CHECKING:
    from kitae.models.scorer import Scorer


def main() -> None:
    serve(load)


def load(setup: Mapping[str, Any]) -> tuple[Mapping[str, Any], Answer]:
    config = ModelConfig(path=setup["path"], device=setup["device"], dtype=setup["dtype"])
    return {}, partial(_answer, forked(config.device, partial(_open, config)), setup["threads"])


def _open(config: ModelConfig) -> "Scorer":
    from kitae.models.classifier import load_scalar
    from kitae.models.scorer import Scorer

    model = load_scalar(config)
    policy = model.policy
    most = policy.max_context * longest_token(policy.tokenizer)
    return Scorer(model, Chat(policy.tokenizer, policy.base.generation_config, shields=True, most_bytes=most))


def _answer(open_scorer: "Callable[[], Scorer]", threads: int, job: Mapping[str, Any]) -> Mapping[str, Any]:
    import torch

    torch.set_num_threads(threads)  # set in the fork, because threads do not survive the fork of the template
    scorer = open_scorer()
    read = [_read(talk) for talk in job["talks"]]
    scores = iter(scorer.score([talk for talk in read if not isinstance(talk, DataError)]))
    found = [talk if isinstance(talk, DataError) else next(scores) for talk in read]
    return {"results": [{"error": str(x)} if isinstance(x, DataError) else {"score": x} for x in found]}


def _read(talk: Mapping[str, Any]) -> tuple[Message, ...] | DataError:
    """The conversation with the response, which unlike other answers may be empty."""
    try:
        return (*read_messages(talk["messages"]), Message("assistant", talk["response"]))
    except DataError as error:
        return error
