"""Rules on engine, verifiers, machine, and how the run ended."""

import re
from collections.abc import Sequence

from kitae.observe.diagnosis.base import WINDOW, Seen, rule, sentence, values
from kitae.observe.timeline import Period, union

_ASIDE = ("hold", "sync", "save", "evaluate", "other")
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ")


@rule(
    "crashed",
    "bad",
    title="The run did not end by itself",
    looks_at="the journal, console.log",
    when="nobody works in the run folder, and the run was neither finished nor stopped",
    advice="mend what the error names, then go on with: kitae resume RUN; a process that ends without a word was "
    "killed, most often because memory ran out: lower engine.memory_gb, training.token_budget or "
    "training.prompts_per_step",
    live=False,
)
def crashed(seen: Seen) -> str | None:
    if seen.status != "crashed":
        return None
    where = f"after step {seen.steps[-1]['step']}" if seen.steps else "before the first step was done"
    return f"{where}: {last_error(seen.console) or 'it was ended without a word'}"


def last_error(console: Sequence[str]) -> str:
    """The last error in a console log, or ""."""
    lines = [_STAMP.sub("", line) for line in console]
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith("error: "):
            return lines[i].removeprefix("error: ")
        if lines[i].startswith("Traceback "):
            return next((line for line in reversed(lines[i:]) if line.strip()), "").strip()
    return ""


@rule(
    "engine-gap",
    "bad",
    title="Engine and trainer disagree",
    looks_at="`logp_gap`, `staleness_max`",
    when="on samples of the policy itself (staleness 0), the log-probs differ by more than 0.15 a token over the "
    f"last {WINDOW} steps; or by more than 0.06, and four times as much as at first",
    advice='model.exact = true makes them equal; engine.weights_dtype and engine.cache_dtype = "model", or '
    'model.dtype = "float32", bring them closer; algorithm.correction = "tis" weighs the rest',
)
def engine_gap(seen: Seen) -> str | None:
    fresh = Seen([row for row in seen.steps if not row.get("staleness_max")])
    last, ends = fresh.last("logp_gap"), fresh.ends("logp_gap")
    if last is None:
        return None
    grew = ends is not None and last > 0.06 and last > 4 * ends[0]
    if last <= 0.15 and not grew:
        return None
    before = f", {ends[0]:.4f} at first" if ends else ""
    keys = [key for key in ("engine.weights_dtype", "engine.cache_dtype") if seen.settings.get(key) != "model"]
    return sentence(f"{last:.4f} nats a token over {fresh.span()}{before}", *map(seen.setting, ["model.dtype", *keys]))


@rule(
    "routing-flips",
    "warning",
    title="The routers have left the experts that are repeated",
    looks_at="`routing_flips`",
    when=f"of a mixture of experts, more than a quarter of the choices that the trainer repeats would be made "
    f"otherwise, over the last {WINDOW} steps",
    advice="fewer updates a batch (training.minibatches, training.epochs), a lower training.lr or "
    'pipeline.max_staleness keep the routers near the choices; model.dtype = "float32" where they differ from the '
    "first update on",
)
def routing_flips(seen: Seen) -> str | None:
    share = seen.last("routing_flips")
    if share is None or share <= 0.25:
        return None
    return sentence(f"{share:.0%} of the choices over {seen.span()}", seen.setting("algorithm.experts.routing"))


@rule(
    "importance-weights",
    "bad",
    title="A few tokens carry the whole gradient",
    looks_at="`ess`, `mismatch_max`",
    when=f"the effective sample size of the importance weights is below half of the tokens, over the last {WINDOW} "
    "steps",
    advice='lower pipeline.max_staleness or training.lr; bound the weights (algorithm.correction = "tis", or "mis", '
    "which drops what is too far off)",
)
def importance_weights(seen: Seen) -> str | None:
    size, largest = seen.last("ess"), seen.last("mismatch_max")
    if size is None or size >= 0.5:
        return None
    return sentence(
        f"effective sample size {size:.0%} over {seen.span()}",
        "" if largest is None else f"largest weight {largest:.3g}",
        seen.setting("algorithm.correction.name"),
    )


@rule(
    "staleness",
    "warning",
    title="Samples are too old for what is learnt from them",
    looks_at="`staleness`, `ess`, `overdue`",
    when=f"over the last {WINDOW} steps, samples were a version old or more on average and the effective sample size "
    "was under 80 %; or half of the last 10 steps waited for groups that were overdue",
    advice='lower pipeline.max_staleness; algorithm.correction weighs old samples, and pipeline.overdue = "drop" '
    "goes on without the slowest",
)
def staleness(seen: Seen) -> str | None:
    age, size = seen.last("staleness"), seen.last("ess")
    overdue = [v for v in values(seen.steps[-10:], "overdue") if v > 0]
    bound = seen.setting("pipeline.max_staleness")
    if age is not None and size is not None and age >= 1 and size < 0.8:
        return sentence(f"{age:.1f} versions old, effective sample size {size:.0%} over {seen.span()}", bound)
    if len(seen.steps) >= 10 and len(overdue) >= 5:
        return sentence(f"{len(overdue)} of the last 10 steps had overdue groups", bound)
    return None


@rule(
    "verifier-errors",
    "bad",
    title="Answers cannot be judged",
    looks_at="`error_share`, `first_error`",
    when=f"more than 5 % of the answers of the last {WINDOW} steps",
    advice="see the reasons with: kitae show RUN --errors; repair the verifier, or give it more verifier.timeout",
)
def verifier_errors(seen: Seen) -> str | None:
    share = seen.last("error_share")
    if share is None or share <= 0.05:
        return None
    reasons = [str(row.get("first_error") or "") for row in seen.steps[-WINDOW:]]
    reason = next((line for text in reversed(reasons) for line in text.splitlines()[:1]), "")
    return sentence(f"{share:.0%} of the answers of {seen.span()}", f"the last reason: {reason}" if reason else "")


@rule(
    "slow-checks",
    "warning",
    title="The run waits for its verifier",
    looks_at="timeline.jsonl",
    when="for more than a fifth of the time, answers were being judged and nothing else was done",
    advice="raise verifier.workers, lower verifier.timeout, or let generation go on meanwhile (pipeline.max_staleness)",
    live=False,
)
def slow_checks(seen: Seen) -> str | None:
    spans = _spans(seen)
    if len(seen.steps) < WINDOW or "verify" not in spans:
        return None
    others = union([span for part, found in spans.items() if part != "verify" for span in found])
    everything = union([span for found in spans.values() for span in found])
    alone, whole = _seconds(everything) - _seconds(others), _whole(everything)
    if not whole or alone / whole <= 0.2:
        return None
    return sentence(
        f"{alone:.0f} of {whole:.0f} seconds",
        seen.setting("verifier.workers"),
        seen.setting("verifier.timeout"),
    )


@rule(
    "idle",
    "warning",
    title="The machine idles",
    looks_at="timeline.jsonl, `step_seconds` and its parts, `trainer_idle`, `engine_idle`",
    when="nothing was at work for a quarter of the time; or a quarter went into saving, evaluating, handing over "
    "weights and other things that training waits for; or, with pipeline.max_staleness above 0, trainer or engine "
    "idled for 60 %",
    advice="save and evaluate less often (checkpoint.every, eval.every, eval.prompts); where generation takes most, "
    "more engines (engine.count) or more staleness; where training does, a larger training.token_budget",
    live=False,
)
def idle(seen: Seen) -> str | None:
    if len(seen.steps) < 2 * WINDOW:
        return None
    busy = union([span for found in _spans(seen).values() for span in found])
    whole = _whole(busy)
    if whole and 1 - _seconds(busy) / whole > 0.25:
        return f"nothing was at work for {1 - _seconds(busy) / whole:.0%} of {whole:.0f} seconds"
    total = sum(seen.all("step_seconds"))
    parts = {part: sum(seen.all(f"{part}_seconds")) / total for part in _ASIDE} if total else {}
    if sum(parts.values()) > 0.25:
        shares = ", ".join(f"{part} {share:.0%}" for part, share in parts.items() if share >= 0.01)
        return f"of {total:.0f} seconds: {shares}"
    if seen.settings.get("pipeline.max_staleness"):
        for who in ("trainer", "engine"):
            share = seen.last(f"{who}_idle", 2 * WINDOW)
            if share is not None and share > 0.6:
                return f"the {who} idled for {share:.0%} of {seen.span(2 * WINDOW)}"
    return None


@rule(
    "memory",
    "warning",
    title="Memory is almost used up",
    looks_at="`memory_share`, `device_memory_share`",
    when="92 % of the machine's memory, or 95 % of a GPU's, were in use after the last step",
    advice="lower engine.memory_gb and training.token_budget, or set training.checkpoint_activations",
)
def memory(seen: Seen) -> str | None:
    limits = {"memory_share": (0.92, "the machine's memory"), "device_memory_share": (0.95, "the GPU's memory")}
    for key, (limit, what) in limits.items():
        share = seen.last(key, 1)
        if share is not None and share >= limit:
            return sentence(
                f"{share:.0%} of {what} after step {seen.steps[-1]['step']}",
                seen.setting("engine.memory_gb"),
                seen.setting("training.token_budget"),
            )
    return None


@rule(
    "engine-restarts",
    "warning",
    title="The engine's process was replaced",
    looks_at="`engine_restarts`",
    when="twice or more in the last 20 steps",
    advice="its last words are in console.log; when memory runs out, lower engine.memory_gb",
)
def engine_restarts(seen: Seen) -> str | None:
    bad = [row["step"] for row in seen.steps[-20:] if row.get("engine_restarts")]
    count = sum(values(seen.steps[-20:], "engine_restarts"))
    return f"{count:.0f} times, in steps {', '.join(map(str, bad))}" if count >= 2 else None


def _spans(seen: Seen) -> dict[str, list[Period]]:
    spans: dict[str, list[Period]] = {}
    for row in seen.timeline:
        spans.setdefault(row["part"], []).append((row["start"], row["end"]))
    return spans


def _seconds(spans: list[Period]) -> float:
    return sum(end - start for start, end in spans)


def _whole(spans: list[Period]) -> float:
    return max((end for _, end in spans), default=0.0) - min((start for start, _ in spans), default=0.0)


RULES = (
    crashed,
    engine_gap,
    routing_flips,
    importance_weights,
    staleness,
    verifier_errors,
    slow_checks,
    idle,
    memory,
    engine_restarts,
)
