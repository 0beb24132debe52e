"""One episode of an environment of the package `verifiers`, played by the interpreter that has the package.

    KITAE_VERIFIERS   {"environment": "gsm8k", "args": {…}, "settings": {…}}, as in the recipe
    standard input    the prompt; its context has {"task": {"number": 17, "split": "train"}}
    --check           instead: load the environment and print the numbers of its tasks as the last line

This file runs without Kitae: it needs only the standard library and that package, version 0.4 (`verifiers.v1`) or 0.1.
It claims the token for its reward before it begins, queries the policy at OPENAI_BASE_URL and posts the reward to
KITAE_EPISODE_URL.
"""

import asyncio
import importlib
import importlib.util
import itertools
import json
import os
import sys
import urllib.request
from typing import Any

HELD_OUT = 8
"""One task in this many is held out, if the environment has no held-out tasks."""

_READ = 100_000  # tasks read at most; an environment may have no last one


class Tasks:
    """The tasks of an environment, in a training and a held-out split."""

    def __init__(self, tasks: Any, held_out: Any = None) -> None:
        self._all, self._held_out = tasks, held_out

    def sizes(self) -> dict[str, int]:
        if self._held_out is not None:
            return {"train": len(self._all), "eval": len(self._held_out)}
        held_out = len(self._all) // HELD_OUT
        return {"train": len(self._all) - held_out, "eval": held_out}

    def pick(self, number: int, split: str) -> Any:
        """Task `number` of a split, counted modulo its size; with the split "", of all tasks in their order."""
        if not split:
            if number >= len(self._all):
                raise SystemExit(f"there are {len(self._all)} tasks, got number {number}")
            return self._all[number]
        size = self.sizes()[split]
        if not size:
            raise SystemExit(f"the environment has no task for the split {split!r}: it has {len(self._all)} in all")
        number %= size
        if self._held_out is not None:
            return (self._all if split == "train" else self._held_out)[number]
        if split == "eval":
            return self._all[number * HELD_OUT + HELD_OUT - 1]
        return self._all[min(number + number // (HELD_OUT - 1), len(self._all) - 1)]


class Newer:
    """An environment of `verifiers.v1`: a taskset and the agents that play it."""

    def __init__(self, order: dict[str, Any]) -> None:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        wanted = {**order["settings"], "taskset": {"id": order["environment"], **order["args"]}}
        config = loaders.resolve_env_config(self._placed(wanted, loaders.resolve_env_config(wanted)))
        self._env = loaders.load_environment(config)
        self.tasks = Tasks(list(itertools.islice(self._env.taskset, _READ)))

    def _placed(self, wanted: dict[str, Any], config: Any) -> dict[str, Any]:
        """Settings that make roles run on this machine where neither the recipe nor the environment says where: by
        default, the package would rent machines for them."""
        vf = importlib.import_module("verifiers.v1")
        rented, placed = vf.AgentConfig().runtime, dict(wanted)
        for name in type(config).model_fields:
            role, said = getattr(config, name), wanted.get(name) or {}
            if isinstance(role, vf.AgentConfig) and role.runtime == rented and "runtime" not in said:
                placed[name] = {**said, "runtime": {"type": "subprocess"}}
        return placed

    async def play(self, task: Any) -> tuple[float, str]:
        vf = importlib.import_module("verifiers.v1")
        client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
        context = vf.ModelContext(model=os.environ["OPENAI_MODEL"], client=client)
        async with self._env.serving():
            episode = await self._env.run_slot(self._env.slots(task)[0], context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise SystemExit("; ".join(f"{e.type}: {e.message}" for e in errors) or "the episode is not ok")
        named = {name: r.value for trace in episode.traces for name, r in trace.rewards.items() if r is not None}
        return sum(trace.reward for trace in episode.traces) / len(episode.traces), json.dumps(named)


class Older:
    """An environment of verifiers 0.1: data sets, a rollout and its rubric."""

    def __init__(self, order: dict[str, Any]) -> None:
        if order["settings"]:
            raise SystemExit(f"settings are for verifiers.v1 alone, got {', '.join(order['settings'])}")
        verifiers = importlib.import_module("verifiers")
        self._env = verifiers.load_environment(order["environment"], **order["args"])
        train = self._env.get_dataset()
        held_out = self._env.get_eval_dataset()
        self.tasks = Tasks(train, held_out if held_out is not train else None)

    async def play(self, task: Any) -> tuple[float, str]:
        types = importlib.import_module("verifiers.types")
        client = types.ClientConfig(
            api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY", max_retries=2
        )
        done = await self._env.run_rollout(task, client, os.environ["OPENAI_MODEL"], {})
        if done.get("error"):
            raise SystemExit(str(done["error"]))
        return float(done["reward"]), json.dumps(done.get("metrics") or {})


def load(order: dict[str, Any]) -> Any:
    if importlib.util.find_spec("verifiers") is None:
        raise SystemExit(f"there is no package verifiers for {sys.executable}")
    kind = Older if hasattr(importlib.import_module("verifiers"), "load_environment") else Newer
    try:
        return kind(order)
    except Exception as error:
        raise SystemExit(" ".join(f"{type(error).__name__}: {error}".split())) from None


def post(path: str, body: dict[str, Any]) -> Any:
    """Post to the episode's own address."""
    url = os.environ["KITAE_EPISODE_URL"] + path
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request))


def main() -> None:
    sys.path[0] = os.getcwd()  # an environment may be a module of the folder; ours has none to offer
    env = load(json.loads(os.environ["KITAE_VERIFIERS"]))
    if "--check" in sys.argv:
        print(json.dumps(env.tasks.sizes()))
        return
    token = post("/claim", {})["token"]
    wanted = json.load(sys.stdin)["context"]["task"]
    task = env.tasks.pick(wanted["number"], wanted["split"])
    reward, detail = asyncio.run(env.play(task))
    post("/reward", {"reward": reward, "detail": detail, "token": token})


if __name__ == "__main__":
    main()
