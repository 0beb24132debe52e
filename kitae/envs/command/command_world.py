"""Agent programs in any language: each episode has its own base URL, at which the policy answers.

A program is started for each episode, in a sandbox of its own (`program_sandbox`), and uses its URL like OpenAI's API.
The episode ends when the program does, and the verifier judges the last answer. The program receives:

    OPENAI_BASE_URL, OPENAI_API_KEY   where the policy answers; most clients read these
    OPENAI_MODEL                      the name of the policy; `other_models` says what others mean
    ANTHROPIC_BASE_URL, …_API_KEY, …_MODEL   the same for Anthropic's clients
    KITAE_EPISODE_URL                 GET it + "/prompt"; POST it + "/claim" and "/reward", where the recipe allows it
    standard input                    the prompt as JSON: id, question, messages, context
    {question}, {base_url}, {model}   replaced in the words of the command

**Secrets.** What the model writes may run as a child of the program, and finds all of the above. So none of it is worth
anything: the reference stays here, and nobody can post a reward. A recipe that lets the program give the rewards
(`reward = "program"`), or that shows it the reference, lets it claim them: once, before it asks the policy for the
first time, when nothing that the model wrote can be there. The claim's answer has the token without which no reward is
taken.
"""

import asyncio
import hmac
import json
import os
import secrets
import shlex
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from kitae.clients.addresses import address_of, listen
from kitae.data.chat import Chat
from kitae.envs.base import Outcome
from kitae.envs.command.other_models import NamedModel, OtherModels
from kitae.envs.config import program_variables, read_params
from kitae.envs.episode_processes import EpisodeProcesses, EpisodeProcessLost
from kitae.errors import ConfigError, KitaeWarning
from kitae.sandbox.own_network import Doorway
from kitae.sandbox.program_sandbox import HOME, ProgramSandbox, places, sandboxed
from kitae.section import Section
from kitae.serving.answers import AnswerRenderer
from kitae.serving.app import chat_routes, make_app, name_routes
from kitae.serving.base import Model
from kitae.serving.handlers import AnswerPolicy, ChatHandlers
from kitae.serving.http_bodies import endpoint, json_response, read_body
from kitae.serving.refusals import AdmissionControl, Refused
from kitae.serving.request_bodies import RequestBody
from kitae.serving.running_server import serving
from kitae.serving.server_metrics import Counters
from kitae.serving.streamed_text import streams_early
from kitae.serving.token_text import TokenText
from kitae.types import Prompt

_HOST = "127.0.0.1"
_NAME = "policy"
_MOST_REQUESTS = 10_000  # in flight, for all episodes together; each has limits of its own
_FOREVER = 1e9  # seconds; the episode has its own time limit
_HINTS = (
    *("reasoning_effort", "verbosity", "reasoning", "text.verbosity", "thinking", "output_config.effort"),
)  # request fields without effect, as the run decides how to sample
_EPISODES = "/episodes/{token}"
_NAMING = (
    " (OPENAI_MODEL, ANTHROPIC_MODEL): env.params.models says what other names mean, as in "
    '{ "gpt-4o" = "policy", judge = { url = "http://127.0.0.1:8000/v1" } }'
)


_BARE = (
    'env.params.sandbox = "none" runs agent programs with your rights, and what the model writes where they run it: it '
    "can read the data, the run folder and the memory of this run"
)


class _RewardBody(RequestBody):
    """The reward of the episode, which ends it, or of one of its turns or roles."""

    reward: float
    turn: int | None = None
    role: str = ""
    detail: str = ""
    token: str = ""


class ProgramParams(Section):
    """Settings of what a program of an episode sees."""

    folder: str = Field(".", description="The folder in which it runs; it is read-only in the sandbox.")
    variables: dict[str, str] = Field(default_factory=dict, description="Variables of its environment.")
    pass_on: tuple[str, ...] = Field(
        (), description="Names of variables of ours that it gets too: ['HF_HOME']. What the model writes can read them."
    )
    readable: tuple[str, ...] = Field((), description="Further files and folders that it can read in the sandbox.")
    writable: tuple[str, ...] = Field(
        (), description="Files and folders that it can write in the sandbox; all episodes share them."
    )
    tmp_mb: int = Field(1024, ge=1, description="Size of its /tmp and home, which are empty and end with the episode.")
    sandbox: ProgramSandbox = Field("bwrap", description="Where it runs: bwrap, or none: with your rights.")
    models: dict[str, NamedModel] = Field(
        default_factory=dict,
        description="Other names that the program asks: 'policy', or {url, model, key_env} of a server.",
    )
    network: Literal["episode", "machine"] = Field(
        "episode",
        description="What it reaches from the sandbox: the endpoint of its episode, or the machine's network.",
    )


class CommandParams(ProgramParams):
    """Settings of agent programs."""

    command: str = Field(description="The program of an episode and its arguments, as in a shell: python agent.py.")
    reward: Literal["verifier", "program"] = Field(
        "verifier", description="Who gives the reward: the verifier, or the program, which must claim the right first."
    )
    reference: bool = Field(False, description="Whether the program can claim the reference and all of the context.")
    context: tuple[str, ...] = Field((), description="Names in the prompt's context that it gets with the prompt.")
    keep: int = Field(2000, ge=1, description="Characters of its output that are kept to explain a failure.")


class CommandWorld:
    """A `World`: the server that all programs of a run use, and the processes that they run in."""

    def __init__(self, params: Mapping[str, Any], hidden: Sequence[Path] = ()) -> None:
        self.params = read_params(CommandParams, params, "command")
        self.words = _split(self.params.command)
        self.hidden = [place.absolute() for place in hidden]
        if not Path(self.params.folder).is_dir():
            raise ConfigError(f"env.params.folder must be a folder, got {self.params.folder!r}")
        program = self.words[0]
        found = shutil.which(program, path=self.params.variables.get("PATH")) or "/" in program
        if not found or ("/" in program and not (Path(self.params.folder) / program).exists()):
            raise ConfigError(f"env.command must begin with a program that exists, got {program!r}")
        for name, paths in (("readable", self.params.readable), ("writable", self.params.writable)):
            if missing := [path for path in paths if not Path(path).expanduser().exists()]:
                raise ConfigError(f"env.params.{name} must list what exists, got {missing[0]!r}")
        self.others = OtherModels(self.params.models)
        if self.params.sandbox == "none":
            warnings.warn(_BARE, KitaeWarning, stacklevel=2)
        self.starting = asyncio.Semaphore(max(2, os.cpu_count() or 1))
        self.processes = EpisodeProcesses("kitae.envs.command.agent_process", {}, "agent", ConfigError)
        self._agents: dict[str, CommandAgent] = {}
        self._stack = AsyncExitStack()
        self._url = ""
        self._door: Doorway | None = None

    @property
    def secret(self) -> bool:
        """Whether a program holds something that what it starts must not reach."""
        return self.params.reward == "program" or self.params.reference

    @property
    def variables(self) -> dict[str, str]:
        """Of its environment, but for those of one episode."""
        own = {} if self.params.sandbox == "none" else {"HOME": HOME, "TMPDIR": "/tmp"}
        found = program_variables(self.params.pass_on, {**own, **self.params.variables})
        return {**found, **_reached_directly(found)}

    def command(self, words: Sequence[str]) -> list[str]:
        """The words of a program's command line, in the sandbox."""
        params = self.params
        if params.sandbox == "none":
            return list(words)
        return sandboxed(
            words,
            Path(params.folder).absolute(),
            self.variables.get("PATH", os.defpath),
            readable=places(params.readable),
            writable=places(params.writable),
            hidden=self.hidden,
            guarded=self.secret,
            tmp_mb=params.tmp_mb,
        )

    async def __aenter__(self) -> Self:
        self.command(self.words)  # says whether there is a sandbox, before a model is loaded
        await self._stack.enter_async_context(self.processes)
        self._stack.push_async_callback(self.others.close)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        self._url, self._door = "", None

    def make(self, prompt: Prompt) -> "CommandAgent":
        return CommandAgent(self, prompt)

    async def admit(self, agent: "CommandAgent", chat: Chat) -> str:
        """Register an agent and return its URL. The server starts with the first agent."""
        if not self._url:
            taken = listen(_HOST, 0)
            self._stack.callback(taken.close)
            self._url = address_of(taken, _HOST)
            also = await self._stack.enter_async_context(serving(self._app(chat), taken))
            if self.params.sandbox != "none" and self.params.network == "episode":
                self._door = Doorway(also)
                self._stack.callback(self._door.end)
        if self._door is not None:
            self._door.expect(agent.token)
        self._agents[agent.token] = agent
        return f"{self._url}/episodes/{agent.token}"

    def dismiss(self, agent: "CommandAgent") -> None:
        self._agents.pop(agent.token, None)
        if self._door is not None:
            self._door.close(agent.token)

    def network(self, agent: "CommandAgent") -> dict[str, Any] | None:
        """The network of its own that an admitted agent's program gets; None: the machine's."""
        port = urlsplit(self._url).port
        return None if self._door is None else {"port": port, "door": self._door.path, "token": agent.token}

    def _app(self, chat: Chat) -> Starlette:
        admission = AdmissionControl(_MOST_REQUESTS)
        counters = Counters(admission)
        renderer = AnswerRenderer(_NAME, chat, TokenText(chat.tokenizer), streams_early(chat.tokenizer))
        names = frozenset(self.params.models) - self.others.names
        answer_policy = AnswerPolicy(tries=1, answer_anyway=True, names=names, roles=True, ignored=_HINTS, hint=_NAMING)
        relays = {name: partial(self._relay, name) for name in self.others.names}
        handlers = ChatHandlers(
            lambda request: self._find(request).model,
            renderer,
            admission,
            answer_policy=answer_policy,
            owner=self._find,
            relays=relays,
        )
        own = [
            Route("/prompt", endpoint(self._prompt, counters), methods=["GET"]),
            Route("/claim", endpoint(self._claim, counters), methods=["POST"]),
            Route("/reward", endpoint(self._reward, counters), methods=["POST"]),
        ]
        asked = [*chat_routes(handlers, counters), *name_routes(_NAME, 0, counters)]
        routes = [Mount(_EPISODES, routes=[*asked, *own])]
        return make_app(routes, counters, name=_NAME, context=0, host=_HOST)

    async def _relay(self, name: str, request: Request, body: dict[str, Any]) -> Response:
        self._find(request)
        return await self.others.relay(name, request, body)

    def _find(self, request: Request) -> "CommandAgent":
        agent = self._agents.get(request.path_params["token"])
        if agent is None:
            raise Refused("there is no such episode, or it is over", 404)
        return agent

    async def _prompt(self, request: Request) -> Response:
        return json_response(self._find(request).prompt)

    async def _claim(self, request: Request) -> Response:
        return json_response(self._find(request).claim())

    async def _reward(self, request: Request) -> Response:
        agent = self._find(request)
        body = _RewardBody.read(await read_body(request))
        agent.check_token(body.token)
        if body.turn is not None or body.role:
            agent.reward_part(body.turn, body.role, body.reward)
            return json_response({"ended": False, "reward": body.reward})
        return json_response({"ended": True, "reward": agent.reward(Outcome(body.reward, body.detail))})


class CommandAgent:
    """An `Agent`: one program, from its start to its end."""

    def __init__(self, world: CommandWorld, prompt: Prompt) -> None:
        self.token = secrets.token_urlsafe(18)
        self._world, self._prompt = world, prompt
        self._process = world.processes.create()
        self._posted: asyncio.Future[Outcome] | None = None
        self._of_turns: dict[int, float] = {}
        self._of_roles: dict[str, float] = {}
        self._model: Model | None = None
        self._starting = False
        self._claim_token = ""  # until it is claimed
        self._may_claim = world.secret

    @property
    def model(self) -> Model:
        """The model that answers the program's requests. The first request shows that the program has started, and ends
        the time in which secrets can be claimed."""
        assert self._model is not None
        self._has_started()
        self._may_claim = False
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
        """The prompt as the program receives it, and whatever the model writes may read it."""
        p = self._prompt
        return {
            "id": p.id,
            "question": str(p.context.get("question", p.messages[-1].content if p.messages else "")),
            "messages": [{"role": m.role, "content": m.content} for m in p.messages],
            "context": {name: p.context[name] for name in self._world.params.context if name in p.context},
        }

    def claim(self) -> dict[str, Any]:
        """What the program alone may know: the token for its reward, and the reference if the recipe shows it."""
        params = self._world.params
        if not self._world.secret:
            raise Refused('there is nothing to claim: the recipe sets neither reward = "program" nor reference', 403)
        if not self._may_claim:
            raise Refused("a claim is answered once, before the first request to the policy", 403)
        self._may_claim = False
        claimed: dict[str, Any] = {}
        if params.reward == "program":
            self._claim_token = claimed["token"] = secrets.token_urlsafe(24)
        if params.reference:
            claimed |= {"reference": self._prompt.reference, "context": dict(self._prompt.context)}
        return claimed

    def check_token(self, token: str) -> None:
        """Raise unless it is the one that was claimed."""
        if self._world.params.reward != "program":
            raise Refused('the verifier gives the reward; env.params.reward = "program" lets the program post it', 403)
        if not self._claim_token or not hmac.compare_digest(
            self._claim_token.encode(), token.encode("utf-8", "replace")
        ):
            raise Refused("a reward needs the token of the claim, got none or another", 403)

    async def run(self, model: Model) -> Outcome:
        self._model = model
        self._posted = asyncio.get_running_loop().create_future()
        url = await self._world.admit(self, model.chat)
        running = asyncio.ensure_future(self._process.ask(self._job(url), _FOREVER))
        awaited: tuple[asyncio.Future[Any], ...] = (running, self._posted)
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            found = self._posted.result() if self._posted.done() else _outcome(running.result())
            return replace(found, turns=self._of_turns, roles=self._of_roles)
        except EpisodeProcessLost as loss:
            raise RuntimeError(f"the program was lost: {loss}") from None
        finally:
            self._has_started()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def reward_part(self, turn: int | None, role: str, reward: float) -> None:
        """Set the reward of a turn or of a role, again if need be."""
        if (turn or 0) < 0 or (turn is not None and role):
            raise Refused(f"a reward is of a turn, counted from 0, or of a role, got turn {turn} and role {role!r}")
        if turn is None:
            self._of_roles[role] = reward
        else:
            self._of_turns[turn] = reward

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
            **self._world.variables,
            "OPENAI_BASE_URL": base,
            "OPENAI_API_KEY": self.token,
            "OPENAI_MODEL": _NAME,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": self.token,
            "ANTHROPIC_MODEL": _NAME,
            "KITAE_EPISODE_URL": url,
        }
        return {
            "command": self._world.command([_replaced(word, replacements) for word in self._world.words]),
            "folder": params.folder,
            "guarded": self._world.secret and params.sandbox != "none",
            "variables": variables,
            "input": json.dumps(prompt),
            "keep": params.keep,
            "network": self._world.network(self),
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
