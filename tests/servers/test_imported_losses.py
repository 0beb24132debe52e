"""Settings of TRL and verl, through their own code and through the recipe that is imported from them."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from imported import Result, make_batch, of_recipe

from kitae.importers import trl, verl
from kitae.importers.trl_rewards import Reward
from kitae.models.load import find_model

TOLERANCE = 1e-5
BATCHES = {"near": make_batch(1, 0.05), "far": make_batch(2, 0.4)}
VLLM = {"use_vllm": True}
GRPO: dict[str, dict[str, Any]] = {
    "defaults": {},
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dr_grpo without scaling": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "clip higher": {"epsilon": 0.1, "epsilon_high": 0.28},
    "two-sided clip": {"delta": 1.5},
    "scaled by batch": {"scale_rewards": "batch"},
    "not scaled": {"scale_rewards": False},
    "kl": {"beta": 0.04},
    "kl without correction": {"beta": 0.04, "use_bias_correction_kl": False},
    "kl in grpo": {"beta": 0.1, "loss_type": "grpo"},
    "gspo": {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "loss_type": "grpo"},
    "gspo over tokens": {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 3e-3},
    "luspo of tokens": {"loss_type": "luspo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "cispo of sequences": {"loss_type": "cispo", "epsilon_high": 5.0, "importance_sampling_level": "sequence"},
    "sapo": {"loss_type": "sapo"},
    "sapo with temperatures": {"loss_type": "sapo", "sapo_temperature_pos": 1.3, "sapo_temperature_neg": 2.0},
    "vespo": {"loss_type": "vespo"},
    "vespo with powers": {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 4.0},
    "off-policy mask": {"off_policy_mask_threshold": 0.02},
    "entropy bonus": {"entropy_coef": 0.01},
    "sequence mask": VLLM,
    "sequence mask with a lower bound": {**VLLM, "vllm_importance_sampling_clip_min": 0.9},
    "sequence truncation": {**VLLM, "vllm_importance_sampling_mode": "sequence_truncate"},
    "token truncation": {
        **VLLM,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_min": 0.8,
    },
    "token mask": {**VLLM, "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.8},
    "no correction": {**VLLM, "vllm_importance_sampling_correction": False},
    "off-policy mask with vllm": {**VLLM, "off_policy_mask_threshold": 0.02},
}
REWARDS: dict[str, dict[str, Any]] = {
    "two rewards": {},
    "weighted rewards": {"reward_weights": [1.0, 0.5]},
    "rewards normalised each": {"multi_objective_aggregation": "normalize_then_sum"},
    "weighted, normalised each": {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.3]},
}
RLOO: dict[str, dict[str, Any]] = {
    "rloo": {},
    "rloo without kl": {"beta": 0.0},
    "rloo clipped": {"reward_clip_range": (-0.5, 0.5)},
    "rloo normalised": {"normalize_advantages": True},
    "rloo clip": {"epsilon": 0.1, "epsilon_high": 0.3},
}

_A, _C = "actor_rollout_ref.actor", "algorithm.rollout_correction"
G = {"algorithm.adv_estimator": "grpo"}
VERL: dict[str, dict[str, Any]] = {
    "defaults": {},
    "gae": {"algorithm.gamma": 0.9, "algorithm.lam": 0.95},
    "grpo": G,
    "grpo not scaled": {**G, "algorithm.norm_adv_by_std_in_grpo": False},
    "rloo": {"algorithm.adv_estimator": "rloo"},
    "opo": {"algorithm.adv_estimator": "opo"},
    "remax": {"algorithm.adv_estimator": "remax"},
    "gpg": {"algorithm.adv_estimator": "gpg", f"{_A}.policy_loss.loss_mode": "gpg"},
    "passk": {"algorithm.adv_estimator": "grpo_passk"},
    "reinforce++": {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.gamma": 0.9},
    "reinforce++ baseline": {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"},
    "gdpo": {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["right", "style"]},
    "gdpo weighted": {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["right", "style"],
                      "algorithm.gdpo_reward_weights": [1.0, 0.3]},
    "seq-mean-token-mean": {**G, f"{_A}.loss_agg_mode": "seq-mean-token-mean"},
    "seq-mean-token-sum": {**G, f"{_A}.loss_agg_mode": "seq-mean-token-sum"},
    "seq-mean-token-sum-norm": {**G, f"{_A}.loss_agg_mode": "seq-mean-token-sum-norm"},
    "norm with a factor": {**G, f"{_A}.loss_agg_mode": "seq-mean-token-sum-norm", f"{_A}.loss_scale_factor": 100},
    "token-sum": {**G, f"{_A}.loss_agg_mode": "token-sum"},
    "clip higher": {**G, f"{_A}.clip_ratio_low": 0.1, f"{_A}.clip_ratio_high": 0.28},
    "dual clip": {**G, f"{_A}.clip_ratio_c": 1.5},
    "gspo": {**G, f"{_A}.policy_loss.loss_mode": "gspo", f"{_A}.clip_ratio_low": 3e-4, f"{_A}.clip_ratio_high": 4e-4},
    "sapo": {**G, f"{_A}.policy_loss.loss_mode": "sapo"},
    "cispo": {**G, f"{_A}.policy_loss.loss_mode": "cispo"},
    "cispo wide": {**G, f"{_A}.policy_loss.loss_mode": "cispo",
    f"{_A}.clip_ratio_low": 0.5, f"{_A}.clip_ratio_high": 4.0},
    "geo_mean": {**G, f"{_A}.policy_loss.loss_mode": "geo_mean",
    f"{_A}.clip_ratio_low": 0.4, f"{_A}.clip_ratio_high": 0.4},
    "dro": {**G, f"{_A}.policy_loss.loss_mode": "dro", f"{_A}.policy_loss.dro_beta": 0.05},
    "dppo_tv": {**G, f"{_A}.policy_loss.loss_mode": "dppo_tv", f"{_A}.clip_ratio_c": 1.3},
    "dppo_kl": {**G, f"{_A}.policy_loss.loss_mode": "dppo_kl",
    f"{_A}.clip_ratio_low": 0.05, f"{_A}.clip_ratio_high": 0.05},
    "kl loss": {**G, f"{_A}.use_kl_loss": True},
    "kl loss k2": {**G, f"{_A}.use_kl_loss": True, f"{_A}.kl_loss_type": "mse", f"{_A}.kl_loss_coef": 0.1},
    "kl loss abs": {**G, f"{_A}.use_kl_loss": True, f"{_A}.kl_loss_type": "abs", f"{_A}.kl_loss_coef": 0.1},
    "kl loss straight through": {**G, f"{_A}.use_kl_loss": True, f"{_A}.kl_loss_type": "k3+",
    f"{_A}.kl_loss_coef": 0.1},
    "kl in reward": {**G, "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.05},
    "kl in reward of gae": {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.05},
    "kl in reward of reinforce++": {"algorithm.adv_estimator": "reinforce_plus_plus",
    "algorithm.use_kl_in_reward": True},
    "entropy": {**G, f"{_A}.entropy_coeff": 0.01},
    "token tis": {**G, f"{_C}.rollout_is": "token"},
    "token icepop": {**G, f"{_C}.rollout_is": "token", f"{_C}.rollout_is_threshold": "0.8_1.2"},
    "sequence tis": {**G, f"{_C}.rollout_is": "sequence", f"{_C}.rollout_is_threshold": 1.2},
    "sequence icepop": {**G, f"{_C}.rollout_is": "sequence", f"{_C}.rollout_is_threshold": "0.5_2.0"},
    "bypass": {**G, f"{_C}.bypass_mode": True},
    "bypass reinforce": {**G, f"{_C}.bypass_mode": True, f"{_C}.loss_type": "reinforce"},
    "bypass reinforce, tokens": {**G, f"{_C}.bypass_mode": True, f"{_C}.loss_type": "reinforce",
    f"{_C}.rollout_is": "token"},
    "bypass reinforce, sequences": {**G, f"{_C}.bypass_mode": True, f"{_C}.loss_type": "reinforce",
                                    f"{_C}.rollout_is": "sequence"},
}  # fmt: skip

VERL_REWARDS = {"gdpo": ["right", "style"], "gdpo weighted": ["right", "style"], "passk": ["style"]}

SURROGATES = ("dppo_tv", "dppo_kl", "kl loss straight through")
"""Of these only the gradient is compared: the value of such a loss means nothing, in either of the two."""


def trl_cases() -> dict[str, dict[str, Any]]:
    def cases(trainer: str, settings: Mapping[str, Any], rewards: list[str]) -> dict[str, Any]:
        return {
            f"{trainer}: {name}": {"trainer": trainer, "settings": s, "rewards": rewards}
            for name, s in settings.items()
        }

    found = {
        **cases("grpo", GRPO, ["right"]),
        **cases("grpo", REWARDS, ["right", "style"]),
        **cases("rloo", RLOO, ["right"]),
    }
    return both(found)


def verl_cases() -> dict[str, dict[str, Any]]:
    return both({name: {"settings": s, "rewards": VERL_REWARDS.get(name, ["right"])} for name, s in VERL.items()})


def both(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {f"{name} ({batch})": {**case, "batch": batch} for name, case in cases.items() for batch in BATCHES}


@pytest.fixture(scope="module")
def peers(run_client: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a peer computes for all cases, in one process."""
    known: dict[str, Any] = {}

    def losses(peer: str) -> Any:
        if peer not in known:
            cases = {"trl": trl_cases, "verl": verl_cases}[peer]()
            file = tmp_path_factory.mktemp(peer) / "cases.json"
            order = {"cases": cases, "batches": BATCHES, "tokenizer": str(find_model("tiny"))}
            file.write_text(json.dumps(order))
            known[peer] = run_client(peer, f"{peer}_losses.py", str(file), timeout=1800)
        return known[peer]

    return losses


def compare(peer: Mapping[str, Any], ours: Result, value: bool) -> None:
    assert "error" not in peer, peer["error"]
    assert ours.grad and any(x != 0 for row in ours.grad for x in row), "something is learned"
    if value:
        assert ours.loss == pytest.approx(peer["loss"], abs=TOLERANCE)
    for name, found in (("grad", ours.grad), ("entropy_grad", ours.entropy_grad)):
        for row, expected in zip(found, peer[name], strict=True):
            assert row == pytest.approx(expected, abs=TOLERANCE), name


@pytest.mark.parametrize("name", trl_cases())
def test_trl(name: str, peers: Callable[[str], Any]) -> None:
    case = trl_cases()[name]
    functions = [Reward(reward, place=f"rewards.py:{reward}") for reward in case["rewards"]]
    batch = BATCHES[case["batch"]]
    given = {"model": "tiny", "reward_funcs": functions, "num_generations": batch["group"], "num_iterations": 2,
             "max_completion_length": batch["limit"], "per_device_train_batch_size": len(batch["logp"]), "max_steps": 4,
             **case["settings"]}  # fmt: skip
    t = trl.translate(case["trainer"], given, {})
    weights = case["settings"].get("reward_weights", [1.0] * len(functions))
    compare(peers("trl")[name], of_recipe(t, batch, case["rewards"], weights), value=True)


@pytest.mark.parametrize("name", verl_cases())
def test_verl(name: str, peers: Callable[[str], Any]) -> None:
    case = verl_cases()[name]
    batch = BATCHES[case["batch"]]
    given = {"data.train_batch_size": 3, "actor_rollout_ref.actor.ppo_mini_batch_size": 3,
             "trainer.total_training_steps": 4,
             "data.max_response_length": batch["limit"], "actor_rollout_ref.rollout.n": batch["group"],
             **case["settings"]}  # fmt: skip
    ours = of_recipe(verl.translate(given), batch, case["rewards"], [1.0] * len(case["rewards"]))
    compare(peers("verl")[name], ours, value=not name.startswith(SURROGATES))
