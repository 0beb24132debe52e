"""Agent programs in any language: each episode has its own base URL, at which the policy answers.

A program is started for each episode, and uses its URL like OpenAI's API. The episode ends when the program ends or
posts a reward. The program receives:

    OPENAI_BASE_URL, OPENAI_API_KEY   where the policy answers; most clients read these
    OPENAI_MODEL                      a model name; any other is accepted too
    KITAE_EPISODE_URL                 POST {"reward": 1.0, "detail": "…"} to it + "/reward", GET it + "/prompt"
    standard input                    the prompt as JSON: id, question, messages, reference, context
    {question}, {base_url}, {model}   replaced in the words of the command
"""

import asyncio
import json
import os
import secrets
import shlex
import shutil
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from kitae.clients.addresses import address_of, listen
from kitae.data.chat import Chat
from kitae.envs.base import Outcome
from kitae.envs.config import read_params
from kitae.envs.episode_processes import EpisodeProcesses, EpisodeProcessLost
from kitae.errors import ConfigError
from kitae.section import Section
from kitae.serving.admission import AdmissionControl
from kitae.serving.app import chat_routes, make_app, name_routes
from kitae.serving.base import Model
from kitae.serving.handlers import AnswerPolicy, ChatHandlers
from kitae.serving.http_bodies import endpoint, json_response, read_body
from kitae.serving.refusals import Refused
from kitae.serving.request_bodies import RequestBody
from kitae.serving.responses import AnswerRenderer
from kitae.serving.running_server import serving
from kitae.serving.server_metrics import Counters
from kitae.serving.streamed_text import streams_early
from kitae.serving.token_text import TokenText
from kitae.types import Prompt

_HOST = "127.0.0.1"
_NAME = "policy"
_MOST_REQUESTS = 10_000  # in flight, for all episodes together; each has limits of its own
_FOREVER = 1e9  # seconds; the episode has its own time limit
_HINTS = ("reasoning_effort", "verbosity")  # request fields without effect, as the run decides how to sample
_EPISODES = "/episodes/{token}"


class _RewardBody(RequestBody):
    reward: float
    detail: str = ""


class CommandParams(Section):
    """Settings of agent programs."""

    command: str = Field(description="The program of an episode and its arguments, as in a shell: python agent.py.")
    folder: str = Field(".", description="The folder in which it runs.")
    variables: dict[str, str] = Field(default_factory=dict, description="Variables of its environment.")
    keep: int = Field(2000, ge=1, description="Characters of its output that are kept to explain a failure.")


class CommandWorld:
    """A `World`: the server that all programs of a run use, and the processes that they run in."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.params = read_params(CommandParams, params, "command")
        self.words = _split(self.params.command)
        if not Path(self.params.folder).is_dir():
            raise ConfigError(f"env.params.folder must be a folder, got {self.params.folder!r}")
        program = self.words[0]
        found = shutil.which(program, path=self.params.variables.get("PATH")) or "/" in program
        if not found or ("/" in program and not (Path(self.params.folder) / program).exists()):
            raise ConfigError(f"env.command must begin with a program that exists, got {program!r}")
        self.starting = asyncio.Semaphore(max(2, os.cpu_count() or 1))
        self.processes = EpisodeProcesses("kitae.envs.command.agent_process", {}, "agent", ConfigError)
        self._agents: dict[str, CommandAgent] = {}
        self._stack = AsyncExitStack()
        self._url = ""

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.processes)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        self._url = ""

    def make(self, prompt: Prompt) -> "CommandAgent":
        return CommandAgent(self, prompt)

    async def admit(self, agent: "CommandAgent", chat: Chat) -> str:
        """Register an agent and return its URL. The server starts with the first agent."""
        if not self._url:
            taken = listen(_HOST, 0)
            self._stack.callback(taken.close)
            self._url = address_of(taken, _HOST)
            await self._stack.enter_async_context(serving(self._app(chat), taken))
        self._agents[agent.token] = agent
        return f"{self._url}/episodes/{agent.token}"

    def dismiss(self, agent: "CommandAgent") -> None:
        self._agents.pop(agent.token, None)

    def _app(self, chat: Chat) -> Starlette:
        admission = AdmissionControl(_MOST_REQUESTS)
        counters = Counters(admission)
        renderer = AnswerRenderer(_NAME, chat, TokenText(chat.tokenizer), streams_early(chat.tokenizer))
        answer_policy = AnswerPolicy(tries=1, answer_anyway=True, any_name=True, ignored=_HINTS)
        handlers = ChatHandlers(
            lambda request: self._find(request).model, renderer, admission, answer_policy=answer_policy
        )
        own = [
            Route("/prompt", endpoint(self._prompt, counters), methods=["GET"]),
            Route("/reward", endpoint(self._reward, counters), methods=["POST"]),
        ]
        asked = [*chat_routes(handlers, counters), *name_routes(_NAME, 0, counters)]
        routes = [Mount(_EPISODES, routes=[*asked, *own])]
        return make_app(routes, counters, name=_NAME, context=0, host=_HOST)

    def _find(self, request: Request) -> "CommandAgent":
        agent = self._agents.get(request.path_params["token"])
        if agent is None:
            raise Refused("there is no such episode, or it is over", 404)
        return agent

    async def _prompt(self, request: Request) -> Response:
        return json_response(self._find(request).prompt)

    async def _reward(self, request: Request) -> Response:
        agent = self._find(request)
        body = _RewardBody.read(await read_body(request))
        return json_response({"ended": True, "reward": agent.reward(Outcome(body.reward, body.detail))})


class CommandAgent:
    """An `Agent`: one program, from its start to its end."""

    def __init__(self, world: CommandWorld, prompt: Prompt) -> None:
        self.token = secrets.token_urlsafe(18)
        self._world, self._prompt = world, prompt
        self._process = world.processes.create()
        self._posted: asyncio.Future[Outcome] | None = None
        self._model: Model | None = None
        self._starting = False

    @property
    def model(self) -> Model:
        """The model that answers the program's requests. The first request shows that the program has started."""
        assert self._model is not None
        self._has_started()
        return self._model

    async def enter(self) -> None:
        """Wait to start: only about as many programs as there are processors start at the same time."""
        await self._world.starting.acquire()
        self._starting = True

    def _has_started(self) -> None:
        if self._starting:
            self._starting = False
            self._world.starting.release()

    @property
    def prompt(self) -> dict[str, Any]:
        """The prompt as the program receives it."""
        p = self._prompt
        return {
            "id": p.id,
            "question": str(p.context.get("question", p.messages[-1].content if p.messages else "")),
            "messages": [{"role": m.role, "content": m.content} for m in p.messages],
            "reference": p.reference,
            "context": dict(p.context),
        }

    async def run(self, model: Model) -> Outcome:
        self._model = model
        self._posted = asyncio.get_running_loop().create_future()
        url = await self._world.admit(self, model.chat)
        running = asyncio.ensure_future(self._process.ask(self._job(url), _FOREVER))
        awaited: tuple[asyncio.Future[Any], ...] = (running, self._posted)
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            return self._posted.result() if self._posted.done() else _outcome(running.result())
        except EpisodeProcessLost as loss:
            raise RuntimeError(f"the program was lost: {loss}") from None
        finally:
            self._has_started()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def reward(self, outcome: Outcome) -> float | None:
        """Set the reward unless one was posted before. Returns the reward that counts."""
        assert self._posted is not None  # `run` made it before it passed the address to the program
        if not self._posted.done():
            self._posted.set_result(outcome)
        return self._posted.result().reward

    async def close(self) -> None:
        self._has_started()
        self._world.dismiss(self)
        await self._process.close()

    def _job(self, url: str) -> dict[str, Any]:
        params, prompt = self._world.params, self.prompt
        base = f"{url}/v1"
        replacements = {"{question}": prompt["question"], "{base_url}": base, "{model}": _NAME}
        variables = {
            **os.environ,
            **params.variables,
            **_reached_directly({**os.environ, **params.variables}),
            "OPENAI_BASE_URL": base,
            "OPENAI_API_KEY": self.token,
            "OPENAI_MODEL": _NAME,
            "KITAE_EPISODE_URL": url,
        }
        return {
            "command": [_replaced(word, replacements) for word in self._world.words],
            "folder": params.folder,
            "variables": variables,
            "input": json.dumps(prompt),
            "keep": params.keep,
        }


def _outcome(answer: Mapping[str, Any]) -> Outcome:
    """The outcome of a program that ended without posting a reward."""
    if "refused" in answer:
        raise RuntimeError(f"the program could not be started: {answer['refused']}")
    if answer["status"]:
        said = " ".join(answer["words"].split())[-400:]
        raise RuntimeError(f"the program ended with status {answer['status']}: {said or 'it printed nothing'}")
    return Outcome()


def _reached_directly(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that make clients bypass proxies for this machine."""
    known = {name: variables.get(name, "") for name in ("no_proxy", "NO_PROXY")}
    return {name: ",".join(filter(None, (hosts, _HOST))) for name, hosts in known.items()}


def _replaced(word: str, replacements: Mapping[str, str]) -> str:
    for mark, text in replacements.items():
        word = word.replace(mark, text)
    return word


def _split(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as problem:
        raise ConfigError(f"env.command cannot be split into words: {problem}, got {command!r}") from None
    if not words:
        raise ConfigError(f"env.command must name a program, got {command!r}")
    return words
