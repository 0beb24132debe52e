"""Rules on what learning does to the policy."""

from statistics import fmean, median

from kitae.observe.diagnosis.base import WINDOW, Seen, rule, sentence, values

SOLVED = 0.9
"""The mean reward above which a task counts as solved; then low entropy and few groups with signal are no problem."""

_HIGH = 0.8
"""The mean reward from which low entropy is what was wanted."""

_FAR = 100.0  # difference of two scores whose sigmoid is 0 or 1 in single precision
_ENOUGH = 20  # steps after which something should be learnt, if they are also half of those planned


@rule(
    "lr-too-high",
    "bad",
    title="Training broke the policy",
    looks_at="`reward`, held-out `avg`",
    when=f"over the last {WINDOW} steps the reward is under a quarter of what two steps in a row had reached, and at "
    "least 0.1 below it; or the held-out interval has fallen below the first one (that of a loss: risen above it)",
    advice="lower training.lr, by a factor of 3 to 10 at first, and start again from the model or a checkpoint "
    "before the fall; training.warmup_steps and algorithm.kl.coef hold it back too",
)
def lr_too_high(seen: Seen) -> str | None:
    why = sentence(seen.setting("training.lr"), seen.setting("training.warmup_steps"))
    found = seen.held_out()
    if found is not None and seen.held_out_worse():
        then, now = (f"{row['avg']:.3f} at step {row['step']}" for row in found)
        return sentence(f"held-out {seen.measure} {then}, {now}", why)
    fallen = fell_from(seen)
    if fallen is None:
        return None
    step, best, last_mean = fallen
    return sentence(f"reward {best:.3f} at steps {step} and {step + 1}, {last_mean:.3f} over {seen.span()}", why)


def fell_from(seen: Seen) -> tuple[int, float, float] | None:
    """The first of the two best successive steps, their mean reward, and that of the last steps, if it is far lower."""
    rows = [row for row in seen.steps if values([row], "reward")]
    last = seen.last("reward")
    if last is None or len(rows) < WINDOW + 2:
        return None
    rewards = values(rows, "reward")
    floor = min(0.0, *rewards)
    pairs = [fmean(rewards[i : i + 2]) for i in range(len(rewards) - WINDOW)]
    best = max(pairs)
    if best - last < 0.1 or last - floor > (best - floor) / 4:
        return None
    return int(rows[pairs.index(best)]["step"]), best, last


@rule(
    "lr-too-low",
    "warning",
    title="The policy hardly moves",
    looks_at="`reward`, `entropy`, held-out `avg`",
    when=f"in {_ENOUGH} steps or more with updates the reward rose by less than 0.03, the entropy changed by less "
    "than 15 %, and held-out accuracy did not rise",
    advice="raise training.lr, by a factor of 3 to 10 at first (LoRA wants about ten times the rate of full "
    "training); or train longer",
)
def lr_too_low(seen: Seen) -> str | None:
    reward, entropy = _unlearnt(seen), seen.thirds("entropy")
    if reward is None or entropy is None or abs(entropy[1] - entropy[0]) >= 0.15 * entropy[0]:
        return None
    moved = f"entropy {entropy[0]:.3f} → {entropy[1]:.3f}"
    return sentence(f"{reward}, {moved} in {len(seen.steps)} steps", seen.setting("training.lr"))


@rule(
    "nothing-learnt",
    "warning",
    title="Nothing was learnt",
    looks_at="`reward`, `entropy`, held-out `avg`",
    when=f"in {_ENOUGH} steps or more with updates the reward rose by less than 0.03 and held-out accuracy did not "
    "rise, although the policy moved",
    advice="look at answers (kitae show RUN --worst) and check that rewards follow what you want; make the task "
    "easier, the groups larger (training.group_size), the batch larger (training.prompts_per_step), or train longer",
    live=False,
)
def nothing_learnt(seen: Seen) -> str | None:
    reward = _unlearnt(seen)
    if reward is None or lr_too_low.check(seen) is not None or lr_too_high.check(seen) is not None:
        return None
    found = seen.held_out()
    held_out = f"held-out {found[0]['avg']:.3f} → {found[1]['avg']:.3f}" if found else ""
    return sentence(f"{reward} in {len(seen.steps)} steps", held_out)


def _unlearnt(seen: Seen) -> str | None:
    """The reward's change in a run that could have learnt and did not; None for other runs."""
    reward, updates = seen.thirds("reward"), seen.all("updates")
    enough = max(_ENOUGH, float(seen.settings.get("training.steps") or 0) / 2)
    if len(seen.steps) < enough or reward is None or sum(u > 0 for u in updates) < len(updates) / 2:
        return None
    first, last = reward
    if first > SOLVED or last >= first + 0.03 or last >= 1.5 * first > 0 or seen.held_out_rose():
        return None
    return f"reward {first:.3f} → {last:.3f}"


@rule(
    "entropy-collapse",
    "bad",
    title="The entropy has collapsed",
    looks_at="`entropy`, `reward`, `groups_with_signal`",
    when=f"over the last {WINDOW} steps that have it, the entropy is under a tenth of what it was, the reward is "
    f"not high (under {_HIGH}), and fewer than half of the groups have signal or the reward stands still",
    advice="raise sampling.temperature, or algorithm.gate.clip_high, or set algorithm.entropy.coef; a lower "
    "training.lr and fewer training.epochs slow it down",
)
def entropy_collapse(seen: Seen) -> str | None:
    entropy, reward = seen.ends("entropy", 3), seen.last("reward")
    if entropy is None or reward is None or entropy[1] >= 0.1 * entropy[0] or reward > _HIGH:
        return None
    signal, rewards = signal_share(seen), seen.ends("reward")
    stands = rewards is not None and rewards[1] - rewards[0] < 0.05
    if not stands and (signal is None or signal >= 0.5):
        return None
    return sentence(
        f"entropy {entropy[0]:.3f} at first, {entropy[1]:.4f} at the end, with a reward of {reward:.3f}",
        "" if signal is None else f"{signal:.0%} of the groups of {seen.span()} have signal",
    )


@rule(
    "entropy-explosion",
    "bad",
    title="The answers become random",
    looks_at="`entropy`, `reward`",
    when="the entropy is more than three times what it was, and above 1 nat, while the reward has not risen",
    advice="lower training.lr and algorithm.entropy.coef; set algorithm.kl.coef; with samples that are old, lower "
    "pipeline.max_staleness",
)
def entropy_explosion(seen: Seen) -> str | None:
    entropy, reward = seen.ends("entropy", 3), seen.ends("reward", 3)
    if entropy is None or entropy[1] < 1 or entropy[1] <= 3 * entropy[0]:
        return None
    if reward is None or reward[1] > reward[0] + 0.02:
        return None
    return sentence(
        f"entropy {entropy[0]:.3f} at first, {entropy[1]:.3f} at the end; reward {reward[0]:.3f} → {reward[1]:.3f}",
        seen.setting("training.lr"),
        seen.setting("algorithm.entropy.coef"),
    )


@rule(
    "kl-runaway",
    "bad",
    title="The policy runs away from the reference",
    looks_at="`kl_k3`, `kl_per_response`",
    when=f"the KL divergence to the reference is above 0.5 nats for each token, over the last {WINDOW} steps",
    advice="raise algorithm.kl.coef or lower training.lr; look whether the answers are still text (kitae show RUN)",
)
def kl_runaway(seen: Seen) -> str | None:
    found = seen.last("kl_k3")
    if found is None or found < 0.5:
        return None
    whole = seen.last("kl_per_response")
    return sentence(
        f"KL {found:.3f} nats a token over {seen.span()}",
        "" if whole is None else f"{whole:.1f} for a response",
        seen.setting("algorithm.kl.coef"),
    )


@rule(
    "gradient-growth",
    "warning",
    title="Gradients have become far larger",
    looks_at="`grad_norm`",
    when="the median of the last ten norms is more than ten times that of the first ten, and above five times "
    "training.clip_norm",
    advice="lower training.lr; look for rewards far outside the usual (kitae show RUN --best); training.clip_norm "
    "bounds what one update can do, not the direction",
)
def gradient_growth(seen: Seen) -> str | None:
    norms, limit = seen.all("grad_norm"), float(seen.settings.get("training.clip_norm") or 1.0)
    if len(norms) < 20:
        return None
    first, last = median(norms[:10]), median(norms[-10:])
    if last <= 10 * first or last <= 5 * limit:
        return None
    return sentence(f"norm {first:.3g} at first, {last:.3g} at the end", seen.setting("training.clip_norm"))


@rule(
    "scores-run-away",
    "bad",
    title="The scores have run away",
    looks_at="`margin`",
    when=f"chosen and rejected answers are more than {_FAR:g} apart, over the last {WINDOW} steps: from there "
    "on, pairs in the right order teach nothing any more, to the last digit",
    advice="lower training.lr, by a factor of 10 at first, and start again from the model that it began with",
)
def scores_run_away(seen: Seen) -> str | None:
    margin = seen.last("margin")
    if margin is None or abs(margin) <= _FAR:
        return None
    return sentence(f"margin {margin:.3g} over {seen.span()}", seen.setting("training.lr"))


@rule(
    "skipped-updates",
    "bad",
    title="Updates are skipped, because gradients are not finite",
    looks_at="`skipped_updates`, `critic_skipped_updates`",
    when="two of the last 20 steps, or more, had such an update",
    advice='lower training.lr; use model.dtype = "float32" or "bfloat16"; a loss of your own may divide by 0',
)
def skipped_updates(seen: Seen) -> str | None:
    rows = seen.steps[-20:]
    bad = [r["step"] for r in rows if (r.get("skipped_updates") or 0) + (r.get("critic_skipped_updates") or 0) > 0]
    return f"steps {', '.join(map(str, bad))}" if len(bad) >= 2 else None


@rule(
    "clipped",
    "warning",
    title="Most of the gradient is clipped away",
    looks_at="`clip_high`, `clip_low`, `clip_dual`",
    when=f"the gate stopped more than 30 % of the tokens, over the last {WINDOW} steps",
    advice="fewer training.epochs and training.minibatches, a lower training.lr, or younger samples "
    "(pipeline.max_staleness)",
)
def clipped(seen: Seen) -> str | None:
    shares = [seen.last(key) for key in ("clip_high", "clip_low", "clip_dual")]
    total = sum(share or 0.0 for share in shares)
    if total <= 0.3:
        return None
    return sentence(f"{total:.0%} of the tokens over {seen.span()}", seen.setting("training.lr"))


def signal_share(seen: Seen, count: int = WINDOW) -> float | None:
    """The share of groups of the last steps, dropped ones included, whose rewards differ; None for groups of one."""
    if seen.settings.get("training.group_size") == 1:
        return None
    rows = seen.steps[-count:]
    signal = values(rows, "groups_with_signal")
    groups = sum(values(rows, "groups")) + sum(values(rows, "groups_dropped"))
    return sum(signal) / groups if len(signal) == count and groups else None


RULES = (
    lr_too_high,
    lr_too_low,
    nothing_learnt,
    entropy_collapse,
    entropy_explosion,
    kl_runaway,
    gradient_growth,
    scores_run_away,
    skipped_updates,
    clipped,
)
