"""What stage functions declare: those of a user's own get what they ask for, and the run learns what it must make."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixture_p import (
    PLAIN,
    advantages,
    f32,
    flat,
    group_p,
    loss_of,
    loss_values,
    make_group,
    make_objective,
    make_rollout,
    of_samples,
    token_losses,
    tokens_p,
    trainable,
    with_numbers,
)
from short_settings import algorithm_with

from kitae.algorithms.advantages import SequenceRewards, gae
from kitae.algorithms.functions import Functions
from kitae.algorithms.requirements import NEEDS, Trait, needs, traits_of
from kitae.errors import ConfigError

Own = Callable[..., str]


@pytest.fixture
def own(tmp_path: Path) -> Own:
    """`own("tokens", "values", gets="sequence", returns="…")`: the name of a new function that needs these."""

    def write(*wanted: str, gets: str, returns: str, settings: str = "") -> str:
        names = ", ".join(f'"{name}"' for name in wanted)
        mark = f"@needs({names})\n" if wanted else ""
        head = "import numpy as np\nfrom kitae.algorithms.requirements import needs\n\n"
        path = tmp_path / f"own{len(list(tmp_path.iterdir()))}.py"
        path.write_text(f"{head}{mark}def f({gets}{settings}):\n    return {returns}\n")
        return f"{path}:f"

    return write


def test_an_advantage_on_tokens_sees_one_sequence(own: Own) -> None:
    """Its reward stands at the last token; what it returns is that of each token."""
    name = own("tokens", gets="sequence", returns="np.cumsum(sequence.rewards_T[::-1])[::-1] * np.arange(1, 4)")
    objective = make_objective(advantage=name)
    assert advantages(objective, make_group([1, 0.5], lengths=[3, 3])) == [[1, 2, 3], [0.5, 1, 1.5]]
    assert not (objective.wants_values or objective.wants_greedy or objective.wants_reference or objective.wants_old)


def test_without_a_need_the_same_advantage_sees_a_group(own: Own) -> None:
    objective = make_objective(advantage=own(gets="group", returns="group.rewards_G * len(group.rewards_G)"))
    assert of_samples(advantages(objective, make_group([1, 0.5, 0]))) == [3, 1.5, 0]


def test_values_of_a_critic_and_the_returns_it_learns(own: Own) -> None:
    name = own("tokens", "values", gets="sequence", returns="sequence.rewards_T - sequence.values_T * weight",
               settings=", *, weight")  # fmt: skip
    objective = make_objective(advantage={"name": name, "weight": 2.0}, critic_lr=3e-5)
    assert objective.wants_values and not objective.wants_reference
    values = [[0.5, 0.25], [0.125, 1.0]]
    found = objective.advantages(with_numbers(objective.candidates([make_group([1, 0], lengths=[2, 2])]), value=values))
    assert loss_values(found) == [[-1.0, 0.5], [-0.25, -2.0]]
    assert loss_values(found, "return") == [[-0.5, 0.75], [-0.125, -1.0]]
    with pytest.raises(ConfigError, match=r"algorithm\.critic\.lr is set to 3e-05, but nothing reads it"):
        make_objective(advantage=own("tokens", gets="sequence", returns="sequence.rewards_T"), critic_lr=3e-5)


def test_ones_own_gae_is_gae(own: Own) -> None:
    call = "__import__('kitae.algorithms.advantages', fromlist=['gae']).gae(sequence, gamma=gamma, gae_lambda=0.9)"
    name = own("tokens", "values", gets="sequence", returns=call, settings=", *, gamma")
    objective = make_objective(advantage=name, gamma=0.95)
    values = [0.5, 0.25, 0.75]
    found = objective.advantages(with_numbers(objective.candidates([make_group([1], lengths=[3])]), value=[values]))
    expected = gae(SequenceRewards(f32([0, 0, 1]), f32(values)), gamma=0.95, gae_lambda=0.9)
    assert flat(loss_values(found)) == expected.tolist()


def test_an_advantage_on_groups_may_read_the_greedy_response(own: Own) -> None:
    objective = make_objective(advantage=own("greedy", gets="group", returns="group.rewards_G - group.greedy"))
    assert objective.wants_greedy
    groups = [make_group([1, 0], group=g, greedy=make_rollout(b, group=g, index=-1)) for g, b in ((5, 0.25), (2, 1.0))]
    assert of_samples(advantages(objective, *groups)) == [0.75, -0.25, 0, -1]
    assert objective.drop_reason(make_group([1, 0])) == "errors", "its greedy response is missing"
    plain = make_objective(advantage=own(gets="group", returns="np.full(2, group.greedy is None)"))
    assert not plain.wants_greedy
    assert of_samples(advantages(plain, groups[0])) == [1, 1]


@pytest.mark.parametrize("reference", [None, "ema"])
def test_an_advantage_on_tokens_may_read_the_reference(reference: str | None, own: Own) -> None:
    """Without a KL term: log-probs of π_old and π_ref come with the samples."""
    name = own("tokens", "reference", gets="sequence", returns="sequence.logp_old_T - sequence.logp_ref_T")
    choices = {"reference": reference} if reference else {}
    objective = make_objective(advantage=name, **choices)
    assert objective.wants_reference and objective.wants_old and not objective.kl_in_reward
    candidates = objective.candidates([make_group([1, 0], lengths=[2, 1])])
    found = with_numbers(candidates, logp_old=[[-1.0, -2.0], [-3.0]], logp_ref=[[-1.5, -1.0], [-3.0]])
    assert loss_values(objective.advantages(found)) == [[0.5, -1.0], [0.0]]


def test_log_probs_are_there_only_where_they_are_needed(own: Own) -> None:
    name = own(
        "tokens", gets="sequence", returns="np.full(2, sequence.logp_old_T is None and sequence.values_T is None)"
    )
    assert advantages(make_objective(advantage=name), make_group([1], lengths=[2])) == [[1, 1]]


def test_a_token_stage_may_need_the_reference(own: Own) -> None:
    correction = own("reference", gets="tokens", returns="(tokens.logp_ref_N - tokens.logp_old_N).exp()")
    objective = make_objective(**{**PLAIN, "correction": correction})
    assert objective.wants_reference and not objective.wants_old, "the loss has π_old anyway"


def test_a_gate_may_need_the_rank_by_covariance(own: Own) -> None:
    returns = "-tokens.advantage_N * ratio_N * (tokens.cov_rank_N >= 0.3)"
    objective = make_objective(**PLAIN, gate=own("covariance", gets="ratio_N, tokens", returns=returns))
    assert all("cov_rank" in s.columns for s in trainable(objective, group_p()))
    ranks = tokens_p(objective).cov_rank_N
    assert ranks is not None
    found = token_losses(objective, tokens_p(objective))
    assert [i for i, rank in enumerate(ranks.tolist()) if rank < 0.3] == [1, 4]
    assert [i for i, loss in enumerate(found) if loss == 0] == [1, 4]
    without = make_objective(**PLAIN, gate=own(gets="ratio_N, tokens", returns="-tokens.advantage_N * ratio_N"))
    assert all("cov_rank" not in s.columns for s in trainable(without, group_p()))
    assert tokens_p(without).cov_rank_N is None
    loss_of(without, tokens_p(without))


def test_groups_of_one_are_counted_where_a_function_compares(own: Own) -> None:
    alone = make_group([1, None])
    compares = make_objective(advantage=own("group", gets="group", returns="group.rewards_G - group.rewards_G.mean()"))
    assert compares.group_metrics([alone]) == {"groups_too_small": 1}
    takes = make_objective(advantage=own(gets="group", returns="group.rewards_G"))
    assert takes.group_metrics([alone]) == {"groups_too_small": 0}


def test_an_unknown_need_names_those_there_are(own: Own) -> None:
    with pytest.raises(ConfigError) as caught:
        needs("tokens", "value")
    assert f"a stage function may need {', '.join(NEEDS)}, got 'value'" in str(caught.value)
    assert "did you mean 'values'" in str(caught.value)
    with pytest.raises(
        ConfigError,
        match=r"may need values, greedy, reference, teacher, divergence, tokens, turns, covariance, group, got",
    ):
        make_objective(advantage=own("critic", gets="group", returns="group.rewards_G"))


def test_what_is_declared_survives_settings_and_guards(own: Own) -> None:
    """Functions are wrapped twice before they are called."""
    name = own("tokens", "greedy", gets="sequence", returns="sequence.rewards_T", settings=", *, gamma, scale=1.0")
    functions = Functions(algorithm_with(advantage={"name": name, "gamma": 0.5, "scale": 2.0}), max_tokens=8)
    assert functions.of("advantage") == Trait.TOKENS | Trait.GREEDY
    assert functions.one("advantage").keywords == {"gamma": 0.5, "scale": 2.0}  # type: ignore[attr-defined]
    assert Trait.GREEDY in functions.traits and Trait.VALUES not in functions.traits
    assert traits_of(np.sum) == Trait(0)


def test_a_token_advantage_must_return_a_number_for_each_token(own: Own) -> None:
    objective = make_objective(advantage=own("tokens", gets="sequence", returns="sequence.rewards_T[:-1]"))
    with pytest.raises(ConfigError, match="the advantage function must return 3 finite numbers"):
        advantages(objective, make_group([1.0], lengths=[3]))


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "custom-algorithms.md").read_text()
    section = page.partition("## What a function needs")[2].partition("\n## ")[0]
    (tmp_path / "my_advantages.py").write_text(section.partition("```python\n")[2].partition("```")[0])
    assert [name for name in NEEDS if f'| `"{name}"` |' not in section] == []
    objective = make_objective(advantage=f"{tmp_path / 'my_advantages.py'}:one_step", gamma=0.5)
    assert objective.wants_values
    found = with_numbers(objective.candidates([make_group([1], lengths=[3])]), value=[[0.5, 0.25, 0.75]])
    assert loss_values(objective.advantages(found)) == [[-0.375, 0.125, 0.25]]
    greedy = make_objective(advantage=f"{tmp_path / 'my_advantages.py'}:above_greedy")
    group = make_group([1, 0], greedy=make_rollout(0.25, index=-1))
    assert of_samples(advantages(greedy, group)) == [0.75, -0.25]


def test_a_term_that_is_off_asks_for_nothing(own: Own) -> None:
    kl: dict[str, Any] = {"kl": own("reference", gets="tokens", returns="tokens.logp_N - tokens.logp_ref_N")}
    assert make_objective(**PLAIN, **kl, kl_coef=0.1).wants_reference
    assert not make_objective(**PLAIN).wants_reference


def test_an_advantage_on_tokens_may_read_a_teacher_and_no_reference_comes_of_it(own: Own) -> None:
    name = own("tokens", "teacher", gets="sequence", returns="sequence.logp_teacher_T - 2 * sequence.logp_old_T")
    objective = make_objective(advantage=name)
    assert objective.wants_teacher and objective.wants_old and not objective.wants_reference
    candidates = objective.candidates([make_group([1, 0], lengths=[2, 1])])
    numbers = {"logp_old": [[-1.0, -2.0], [-3.0]], "logp_teacher": [[-1.5, -1.0], [-3.0]]}
    assert loss_values(objective.advantages(with_numbers(candidates, **numbers))) == [[0.5, 3.0], [3.0]]


def test_teacher_and_reference_are_two_columns(own: Own) -> None:
    returns = "sequence.logp_teacher_T - 10 * sequence.logp_ref_T + 100 * sequence.logp_old_T"
    objective = make_objective(advantage=own("tokens", "teacher", "reference", gets="sequence", returns=returns))
    assert objective.wants_teacher and objective.wants_reference
    candidates = objective.candidates([make_group([1], lengths=[1])])
    found = with_numbers(candidates, logp_old=[[-1.0]], logp_ref=[[-2.0]], logp_teacher=[[-3.0]])
    assert loss_values(objective.advantages(found)) == [[-83.0]]


def test_a_gate_may_mix_a_reward_with_the_divergence_from_a_teacher(own: Own) -> None:
    """Its gradient has both; the metrics of the gate are those of the part that has a ratio."""
    returns = "-tokens.advantage_N * ratio_N + 0.5 * tokens.divergence_N"
    mixed = make_objective(**PLAIN, gate=own("divergence", gets="ratio_N, tokens", returns=returns))
    plain = make_objective(**PLAIN, gate="none")
    tokens = tokens_p(mixed)
    _, gradient, metrics = loss_of(mixed, tokens)
    _, without, expected = loss_of(plain, tokens)
    probability = tokens.logp_N.detach().sigmoid()
    assert gradient.tolist() == pytest.approx(
        (without + 0.5 * tokens.weight_N * probability * (1 - probability)).tolist(), abs=1e-6
    )
    for name in ("ratio_gated", "ratio_gated_max", "clip_low", "clip_high"):
        assert metrics[name] == pytest.approx(expected[name]), name
