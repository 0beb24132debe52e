"""Losses and gradients by verl's own functions on a batch that is given: `verl_losses.py CASES.json`.

The settings are verl's defaults with those of the case on top, as its trainer composes them; the way from rewards to a
loss is that of its trainer: the KL penalty, the advantage estimator, rollout correction, `ppo_loss` term by term.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import verl
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils.config import omega_conf_to_dataclass

DEFAULTS = Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml"


def rows(batch: dict[str, Any], name: str) -> torch.Tensor:
    longest = batch["limit"]
    return torch.tensor([row + [0.0] * (longest - len(row)) for row in batch[name]])


def settings(case: dict[str, Any]) -> Any:
    given = {"actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
             "reward.reward_model.rollout.name": "vllm", **case["settings"]}  # fmt: skip
    found = OmegaConf.load(DEFAULTS)
    OmegaConf.set_struct(found, False)
    for key, value in given.items():
        OmegaConf.update(found, key, value, force_add=True)
    OmegaConf.update(
        found,
        "actor_rollout_ref.actor.policy_loss.rollout_correction",
        found.algorithm.rollout_correction,
        force_add=True,
    )
    return found


def advantages_of(config: Any, batch: dict[str, Any], case: dict[str, Any], mask: torch.Tensor) -> torch.Tensor:
    old, lengths = rows(batch, "old"), [len(row) for row in batch["logp"]]
    scores = torch.zeros_like(mask)
    for i, n in enumerate(lengths):
        scores[i, n - 1] = sum(batch["rewards"][name][i] for name in case["rewards"])
    if config.algorithm.use_kl_in_reward:
        kl = core_algos.kl_penalty(old, rows(batch, "ref"), kl_penalty=config.algorithm.kl_penalty) * mask
        scores = scores - core_algos.get_kl_controller(config.algorithm.kl_ctrl).value * kl
    kind = config.algorithm.adv_estimator
    if kind == "gae":
        values = rows(batch, "value")
        found, _ = core_algos.compute_gae_advantage_return(
            scores, values, mask, torch.tensor(config.algorithm.gamma), torch.tensor(config.algorithm.lam)
        )
        return found * mask
    groups = np.array([str(i // batch["group"]) for i in range(len(lengths))], dtype=object)
    asked: dict[str, Any] = {"token_level_rewards": scores, "response_mask": mask, "config": config.algorithm,
                             "index": groups}  # fmt: skip
    if kind in ("grpo", "grpo_vectorized"):
        asked["norm_adv_by_std_in_grpo"] = config.algorithm.norm_adv_by_std_in_grpo
    if kind == "remax":
        asked["reward_baselines"] = torch.tensor([batch["greedy"][i // batch["group"]] for i in range(len(lengths))])
    if kind == "gdpo":
        asked["non_tensor_batch"] = {name: np.array(batch["rewards"][name]) for name in case["rewards"]}
        asked["batch"] = {"prompts": torch.ones(len(lengths), 1), "attention_mask": torch.cat(
            [torch.ones(len(lengths), 1), mask], dim=1).long()}  # fmt: skip
    found, _ = core_algos.get_adv_estimator_fn(kind)(**asked)
    return found


def run(case: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
    config = settings(case)
    correction = config.algorithm.rollout_correction
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    lengths = [len(row) for row in batch["logp"]]
    mask = torch.tensor([[1.0] * n + [0.0] * (batch["limit"] - n) for n in lengths])
    logp, entropy = rows(batch, "logp").requires_grad_(), rows(batch, "entropy").requires_grad_()
    old, mu = rows(batch, "old"), rows(batch, "mu")
    mode = actor.policy_loss.loss_mode
    if correction.bypass_mode:
        mode, old = "bypass_mode", mu
    weights = None
    if correction.rollout_is and not correction.bypass_mode:
        weights, _ = compute_rollout_correction_weights(
            (rows(batch, "old") - mu) * mask, mask, correction.rollout_is, correction.rollout_is_threshold
        )
    actor.global_batch_info.update(
        dp_size=1, batch_num_tokens=None, global_batch_size=None, loss_scale_factor=actor.loss_scale_factor
    )
    loss, _ = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=old, log_prob=logp, advantages=advantages_of(config, batch, case, mask), response_mask=mask,
        loss_agg_mode=actor.loss_agg_mode, config=actor, rollout_is_weights=weights,
    )  # fmt: skip
    means = {"loss_mask": mask, "loss_agg_mode": actor.loss_agg_mode, **actor.global_batch_info}
    loss = loss - actor.entropy_coeff * core_algos.agg_loss(loss_mat=entropy, **means)
    if actor.use_kl_loss:
        kl = core_algos.kl_penalty(logprob=logp, ref_logprob=rows(batch, "ref"), kl_penalty=actor.kl_loss_type)
        loss = loss + actor.kl_loss_coef * core_algos.agg_loss(loss_mat=kl, **means)
    by_logp, by_entropy = torch.autograd.grad(loss, (logp, entropy), allow_unused=True)

    def cut(grad: torch.Tensor | None) -> list[list[float]]:
        return [[0.0] * n if grad is None else grad[i, :n].tolist() for i, n in enumerate(lengths)]

    return {"loss": loss.item(), "grad": cut(by_logp), "entropy_grad": cut(by_entropy)}


def main() -> None:
    warnings.filterwarnings("ignore")
    given = json.loads(Path(sys.argv[1]).read_text())
    found = {}
    for name, case in given["cases"].items():
        try:
            found[name] = run(case, given["batches"][case["batch"]])
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
