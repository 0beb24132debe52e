"""Rules on the data, the answers, and the verifier's scores."""

import zlib
from collections import Counter
from collections.abc import Sequence

from kitae.algorithms.config import may_need_group
from kitae.observe.diagnosis.base import WINDOW, Reply, Seen, rule, sentence, values
from kitae.observe.diagnosis.learning_rules import SOLVED, fell_from, lr_too_high, signal_share

_LONG = 200  # the least number of characters of a text that can be called repetitive
_REPETITIVE = 0.2  # the compressed share of a repetitive text; prose keeps a third or more


@rule(
    "all-wrong",
    "bad",
    title="No answer is ever right",
    looks_at="`reward`",
    when=f"in {WINDOW} steps or more, no step had a mean reward above 0.02; while the run goes on, only if no group of "
    f"the last {WINDOW} had differing rewards",
    advice="look at answers (kitae show RUN --worst) and at the verifier (kitae validate RECIPE): a format that the "
    "model does not know scores 0 too; make the task easier, allow more sampling.max_tokens, show the format in "
    "data.instruction or data.system, or take a stronger model.path",
)
def all_wrong(seen: Seen) -> str | None:
    rewards = seen.all("reward")
    if len(rewards) < WINDOW or max(rewards) > 0.02 or (seen.status == "running" and signal_share(seen)):
        return None
    rollouts = sum(values(seen.steps, "rollouts"))
    return f"{rollouts:.0f} answers of {len(rewards)} steps, mean reward at most {max(rewards):.3f}"


@rule(
    "all-right",
    "warning",
    title="The data is too easy",
    looks_at="`reward`",
    when=f"the first {WINDOW} steps all had a mean reward above 0.98",
    advice="take harder prompts; prompts that were mastered can be asked less often (pipeline.mastered_visits)",
)
def all_right(seen: Seen) -> str | None:
    rewards = seen.all("reward")[:WINDOW]
    if len(rewards) < WINDOW or min(rewards) <= 0.98:
        return None
    return f"mean reward of the first {WINDOW} steps at least {min(rewards):.3f}, before anything was learnt"


@rule(
    "dead-groups",
    "warning",
    title="Most groups teach nothing",
    looks_at="`groups_with_signal`, `groups`, `groups_dropped`, `reward`",
    when=f"over the last {WINDOW} steps, under a fifth of the groups had differing rewards, the reward is between 0.02 "
    "and 0.95, and the algorithm learns from such differences alone; while the run goes on, only if none had",
    advice="larger training.group_size, higher sampling.temperature, prompts of medium difficulty; pipeline.refill "
    "asks others in the place of those that teach nothing",
)
def dead_groups(seen: Seen) -> str | None:
    share, reward = signal_share(seen), seen.last("reward")
    if share is None or reward is None or share >= 0.2 or not 0.02 < reward < SOLVED or fell_from(seen):
        return None
    if (seen.status == "running" and share) or not _compares(seen):
        return None
    return sentence(
        f"{share:.0%} of the groups of {seen.span()} had differing rewards, with a mean reward of {reward:.3f}",
        seen.setting("training.group_size"),
    )


@rule(
    "no-updates",
    "bad",
    title="Nothing is trained on",
    looks_at="`updates`, `reward`",
    when=f"the last {WINDOW} steps made no update, and the task is not solved",
    advice="the filter (algorithm.filter) or algorithm.truncation drops every group: make the task easier, or "
    "loosen them",
)
def no_updates(seen: Seen) -> str | None:
    updates, reward = values(seen.steps[-WINDOW:], "updates"), seen.last("reward")
    if len(updates) < WINDOW or any(updates) or (reward is not None and reward > SOLVED):
        return None
    if lr_too_high.check(seen) is not None:  # that is the reason then
        return None
    return sentence(f"{seen.span()} dropped every group", seen.setting("algorithm.filter.name"))


@rule(
    "truncation",
    "warning",
    title="Answers are cut off",
    looks_at="`truncated`",
    when=f"over the last {WINDOW} steps, more than 90 % of the answers ended at sampling.max_tokens; or more than 30 "
    "%, and 20 points more than at first",
    advice="raise sampling.max_tokens; or make long answers cost something (algorithm.shaping.overlong_buffer), and "
    "look whether they end at all (kitae show RUN)",
)
def truncation(seen: Seen) -> str | None:
    last, ends = seen.last("truncated"), seen.ends("truncated")
    if last is None:
        return None
    grew = ends is not None and last > 0.3 and last - ends[0] >= 0.2
    if last <= 0.9 and not grew:
        return None
    before = f", {ends[0]:.0%} at first" if ends else ""
    return sentence(f"{last:.0%} of the answers of {seen.span()}{before}", seen.setting("sampling.max_tokens"))


@rule(
    "length-explosion",
    "warning",
    title="Answers grow without getting better",
    looks_at="`length`, `reward`, held-out `avg`",
    when="answers are more than twice as long as at first, by 20 tokens or more, while held-out accuracy did not "
    "rise; where there is none, while the reward did not",
    advice="make length cost something (algorithm.shaping.overlong_buffer), or normalise by tokens "
    '(algorithm.aggregation = "token-mean"); a verifier that likes long answers will get them',
)
def length_explosion(seen: Seen) -> str | None:
    length, reward = seen.ends("length"), seen.ends("reward")
    if length is None or length[1] < 2 * length[0] or length[1] - length[0] < 20 or seen.held_out_rose():
        return None
    rose = reward is not None and reward[1] > reward[0] + 0.02
    if rose and seen.held_out() is None:
        return None
    found = seen.held_out()
    return sentence(
        f"{length[0]:.0f} tokens at first, {length[1]:.0f} over {seen.span()}",
        f"reward {reward[0]:.3f} → {reward[1]:.3f}" if reward else "",
        f"held-out {found[0]['avg']:.3f} → {found[1]['avg']:.3f}" if found else "",
    )


@rule(
    "short-answers",
    "warning",
    title="Answers have lost their reasoning",
    looks_at="`length`, held-out `avg`",
    when="answers of 40 tokens or more have shrunk to less than a third, and held-out accuracy did not rise",
    advice="look at answers (kitae show RUN --best): a right answer by luck is worth as much as one with a reason; "
    "ask for reasoning in data.instruction and check its form in the verifier, or use a length-neutral "
    'algorithm.aggregation ("token-mean")',
)
def short_answers(seen: Seen) -> str | None:
    length = seen.ends("length")
    if length is None or length[0] < 40 or length[1] > length[0] / 3 or seen.held_out_rose():
        return None
    return f"{length[0]:.0f} tokens at first, {length[1]:.0f} over {seen.span()}"


@rule(
    "held-out-flat",
    "warning",
    title="The reward rises, held-out accuracy does not",
    looks_at="`reward`, held-out `avg`",
    when="at an evaluation, the mean reward has risen by 0.2 or more from the first to the last third, and by three "
    "times what chance does; held-out accuracy by less than a fifth of that",
    advice="look at what is rewarded (kitae show RUN --best): it may be luck, a habit of the verifier, or prompts "
    "learnt by heart; use more prompts, eval.temperature = 1 to measure what is trained, and a stricter verifier",
)
def held_out_flat(seen: Seen) -> str | None:
    reward, found = seen.thirds("reward"), seen.held_out()
    if reward is None or found is None or found[1]["step"] != seen.steps[-1]["step"]:
        return None
    rise, gain = reward[1] - reward[0], found[1]["avg"] - found[0]["avg"]
    if rise < max(0.2, 3 * seen.noise("reward")) or gain >= rise / 5 or seen.held_out_rose():
        return None
    return f"reward {reward[0]:.3f} → {reward[1]:.3f}; held-out {found[0]['avg']:.3f} → {found[1]['avg']:.3f}"


@rule(
    "components-diverge",
    "warning",
    title="One part of the reward rises at the cost of another",
    looks_at="`reward/…`",
    when="of parts that every step has, one rose by 0.15 or more from the first to the last third, and another fell "
    "by as much",
    advice="change the weights of the parts (verifier.params), or multiply them instead of adding: the cheap part "
    "is learnt first",
)
def components_diverge(seen: Seen) -> str | None:
    names = [key for key in (seen.steps[0] if seen.steps else {}) if key.startswith("reward/")]
    moves = {}
    for name in names:
        ends = seen.thirds(name)
        if ends is not None and len(seen.all(name)) == len(seen.steps):
            moves[name.removeprefix("reward/")] = ends
    if len(moves) < 2:
        return None
    up, down = (pick(moves, key=lambda n: moves[n][1] - moves[n][0]) for pick in (max, min))
    if moves[up][1] - moves[up][0] < 0.15 or moves[down][0] - moves[down][1] < 0.15:
        return None
    return "; ".join(f"{name} {moves[name][0]:.3f} → {moves[name][1]:.3f}" for name in (up, down))


@rule(
    "same-answer",
    "bad",
    title="Different prompts get the same answer",
    looks_at="the answers in the journal",
    when="more than half of the answers of the last two steps are the same text, at least four prompts with "
    "different references were asked, and it was not so at first",
    advice="the policy has collapsed, or one answer pays whatever was asked: look at it (kitae show RUN), repair "
    "the verifier if it pays, else lower training.lr and start again from an earlier checkpoint",
    live=False,
)
def same_answer(seen: Seen) -> str | None:
    first, last = _ends(seen.answers)
    if len({a.group for a in last}) < 4 or _commonest([a.reference for a in last])[1] > 0.4:
        return None
    text, share = _commonest([a.text.strip() for a in last])
    if share <= 0.5 or _commonest([a.text.strip() for a in first])[1] > 0.3:
        return None
    return f"{share:.0%} of the answers of the last steps are {_brief(text)!r}"


@rule(
    "repetition",
    "warning",
    title="Answers repeat themselves",
    looks_at="the answers in the journal",
    when=f"of the answers of the last two steps, more than a quarter are texts of {_LONG} characters or more that "
    "shrink to a fifth when compressed, and 15 points more than at first",
    advice="make length cost something (algorithm.shaping.overlong_buffer), check that the verifier does not pay for "
    "it, and lower training.lr",
    live=False,
)
def repetition(seen: Seen) -> str | None:
    first, last = _ends(seen.answers)
    before, now = _repetitive(first), _repetitive(last)
    if not last or len(now) / len(last) <= 0.25 or len(now) / len(last) - len(before) / max(1, len(first)) < 0.15:
        return None
    share, then = len(now) / len(last), len(before) / max(1, len(first))
    return f"{share:.0%} of the answers of the last steps, {then:.0%} at first; one of them: {_brief(now[-1])!r}"


def _compares(seen: Seen) -> bool:
    """Whether advantages come from differences within a group; with a critic, for example, they do not."""
    return may_need_group(seen.settings.get("algorithm.advantage.name"))


def _ends(answers: Sequence[Reply]) -> tuple[list[Reply], list[Reply]]:
    """The answers of the first two steps and of the last two, if there are at least four steps."""
    steps = sorted({a.step for a in answers})
    if len(steps) < 4:
        return [], []
    return [a for a in answers if a.step in steps[:2]], [a for a in answers if a.step in steps[-2:]]


def _commonest(texts: Sequence[str]) -> tuple[str, float]:
    if not texts:
        return "", 0.0
    text, count = Counter(texts).most_common(1)[0]
    return text, count / len(texts)


def _repetitive(answers: Sequence[Reply]) -> list[str]:
    return [a.text for a in answers if len(a.text) >= _LONG and _left(a.text) < _REPETITIVE]


def _left(text: str) -> float:
    """The compressed size of a text, as a share of its size."""
    data = text.encode(errors="replace")
    return len(zlib.compress(data)) / len(data)


def _brief(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"


RULES = (
    all_wrong,
    all_right,
    dead_groups,
    no_updates,
    truncation,
    length_explosion,
    short_answers,
    held_out_flat,
    components_diverge,
    same_answer,
    repetition,
)
