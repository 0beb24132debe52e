"""TRL's reward functions as verifiers: the user's own as they are, TRL's own where Kitae has the like."""

from dataclasses import dataclass, field
from typing import Any

from kitae.importers.translation import Translation, Unread

_THINK = r"(?s)\A<think>(?!.*<think>)(.*?)</think>.*\Z"


@dataclass(frozen=True, slots=True)
class Reward:
    """A function of a file, or of a package: `Reward("accuracy_reward", package="trl.rewards")`.

    place: `file.py:function`, where it is the user's. arguments: with which it is made. wants: parameters it names.
    """

    name: str
    package: str = ""
    place: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    wants: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def set_rewards(t: Translation) -> None:
    """The verifier. All functions of the user's are one; others are parts beside it."""
    funcs = t["reward_funcs"]
    if t["reward_model_name_or_path"]:
        funcs = [*(funcs if isinstance(funcs, list) else []), t["reward_model_name_or_path"]]
    rewards = [r for r in (funcs if isinstance(funcs, list) else [funcs]) if r is not None]
    weights = list(t["reward_weights"] or [1.0] * len(rewards))
    if len(weights) != len(rewards):
        t.refuse("reward_weights", f"there must be one for each of {len(rewards)} functions")
        weights = [1.0] * len(rewards)
    own: list[tuple[Reward, float]] = []
    parts: list[dict[str, Any]] = []
    refused: list[str] = []
    for reward, weight in zip(rewards, weights, strict=True):
        found = _known(t, reward, weight)
        if isinstance(found, Reward):
            own.append((found, weight))
        elif found is None:
            refused.append(_told(reward))
        elif found:
            parts.append({**found, "weight": weight})
    if own:
        parts = [_own(t, own), *parts]
    _put(t, parts)
    if not parts and t["environment_factory"]:
        t.set("verifier.name", "none", of="environment_factory")
    elif not parts:
        t.set("verifier.name", "rewards.py:reward", of="reward_funcs")
        t.set("verifier.style", "trl", of="reward_funcs")
        t.refuse("reward_funcs", "no reward function can be read: write it, as it is, into rewards.py")
    if refused:
        t.refuse("reward_funcs", f"{', '.join(refused)}: write it as a function of a file, verifier.name = 'file.py:f'")
    _tools(t)


def _own(t: Translation, own: list[tuple[Reward, float]]) -> dict[str, Any]:
    params: dict[str, Any] = {"function": [r.place for r, _ in own]}
    if any(weight != 1 for _, weight in own):
        params["weights"] = [weight for _, weight in own]
    if any("completion_ids" in r.wants for r, _ in own):
        params["tokenizer"] = t.recipe.get("model", {}).get("path", "")
    if any("trainer_state" in r.wants for r, _ in own):
        t.near("reward_funcs", "a verifier's process does not know trainer_state: reading it is an error")
    return {"name": "trl", "params": params}


def _put(t: Translation, parts: list[dict[str, Any]]) -> None:
    if len(parts) > 1:
        t.set("verifier.name", "compose", of="reward_funcs")
        t.set("verifier.params", {"parts": parts}, of="reward_funcs")
    elif parts:
        only = parts[0]
        functions = only.get("params", {}).get("function", [])
        if only["name"] == "trl" and len(functions) == 1:
            t.set("verifier.name", functions[0], of="reward_funcs")
            t.set("verifier.style", "trl", of="reward_funcs")
            params = {key: value for key, value in only["params"].items() if key != "function"}
        else:
            t.set("verifier.name", only["name"], of="reward_funcs")
            params = only.get("params", {})
        if params:
            t.set("verifier.params", params, of="reward_funcs")
        if (weight := only.get("weight", 1.0)) != 1:
            t.set("algorithm.shaping.scale", weight, of="reward_weights")
    if parts:
        t.set("verifier.check_gold", False, of="reward_funcs")


def _known(t: Translation, reward: Any, weight: float) -> Reward | dict[str, Any] | None:
    """The user's own function, a verifier, {} where it is no verifier but said elsewhere, None where it is refused."""
    if isinstance(reward, str) and reward.rpartition(".")[2] not in _NAMED:
        return {"name": "reward_model", "params": {"model": reward}} if "/" in reward else None
    if isinstance(reward, str):
        reward = Reward(reward.rpartition(".")[2], "trl.rewards")
    if not isinstance(reward, Reward):
        return None
    if reward.place:
        return reward
    if reward.name in ("accuracy_reward", "reasoning_accuracy_reward"):
        t.near("reward_funcs", f"{reward.name} is Kitae's verifier math, which reads more notations")
        return {"name": "math"}
    if reward.name == "think_format_reward":
        return {"name": "regex", "label": "think_format", "params": {"pattern": _THINK}}
    if reward.name == "get_soft_overlong_punishment" and weight == 1:
        t.set("algorithm.shaping.overlong_buffer", reward.arguments.get("soft_punish_cache", 256), of="reward_funcs")
        if (most := reward.arguments.get("max_completion_len", 1280)) != t["max_completion_length"]:
            t.near("reward_funcs", f"the penalty ends at max_completion_length, not at {most}")
        return {}
    return None


_NAMED = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")


def _told(reward: Any) -> str:
    if isinstance(reward, Unread):
        return reward.text
    return reward.name if isinstance(reward, Reward) else str(reward)


def _tools(t: Translation) -> None:
    """Functions as tools: the environment of tools, whose verifier still judges the last turn."""
    factory = t["environment_factory"]
    tools = [*(t["tools"] or []), *(factory if isinstance(factory, list) else [])]
    if not tools:
        return
    of = "tools" if t["tools"] else "environment_factory"
    places = [tool.place for tool in tools if isinstance(tool, Reward) and tool.place]
    if len(places) < len(tools):
        t.refuse(of, "a tool must be a function or class of a file: env.params.tools = ['file.py:function']")
    if places:
        t.set("env.name", "tools", of=of)
        t.set("env.params.tools", places, of=of)
        if "max_tool_calling_iterations" not in t.given:
            t.near(of, "env.turns ends an episode after 8 turns; TRL has no limit of its own")
