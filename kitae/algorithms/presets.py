"""Named algorithms as tuples of choices, one per stage. Adding a method is adding an entry here.

`kitae algorithms` and docs/algorithms.md are printed from this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """`choices` are what differs from `BASE`; together they fill what a recipe leaves open.

    A choice is the name of a function, or a table with settings as a recipe has it: `{"gate": {"clip_high": 0.28}}`. A
    setting holds for every function that has it: with `gate = "mask"`, clip_high is 0.28 too.
    """

    title: str
    source: str
    formula: str
    trap: str
    choices: Mapping[str, Any]

    @property
    def complete(self) -> dict[str, Any]:
        """`{"truncation": "keep", "gate": {"name": "clip", "clip_high": 0.28}, …}`: all choices, spelled as tables."""
        found = {key: value if key == "truncation" else _spelled(value) for key, value in BASE.items()}
        for key, value in self.choices.items():
            found[key] = {**found.get(key, {}), **_spelled(value)}
        return found


def _spelled(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {"name": value}


BASE: Mapping[str, Any] = {
    "truncation": "keep",
    "shaping": "standard",
    "filter": "none",
    "advantage": "group-zscore",
    "ratio": "token",
    "gate": "clip",
    "correction": "tis",
    "aggregation": "token-mean",
    "kl": "k2",
    "reference": "none",
}
"""What every preset starts from. Numbers are the defaults of the functions."""

_PLUS_MINUS = {"shaping": {"bias": -0.5, "scale": 2.0}}  # scores in {0, 1} become {-1, 1}
_SEQ = {"aggregation": "seq-mean-token-mean"}


def _kl_in_reward(coef: float) -> dict[str, Any]:
    return {"kl": {"name": "k1", "coef": coef, "into": "reward"}, "reference": "frozen"}


_MINIMALIST = "A minimalist approach to LLM reasoning, arXiv 2504.11343"
_REINFORCE = {**_PLUS_MINUS, **_SEQ, "advantage": "reward"}
_CLIP = "ℓ = max(−A r, −A clip(r, 0.8, 1.2))"

PRESETS: Mapping[str, Preset] = {
    "reinforce": Preset(
        "Policy gradient on ±1 rewards, without a baseline",
        _MINIMALIST,
        f"A = R, R ∈ {{−1, 1}}; {_CLIP}; mean over the tokens of a response, then over responses",
        "With rewards in {0, 1} wrong answers give no signal at all: bias and scale map {0, 1} to {−1, 1}. "
        "min(s, clip(s)) · R, as printed in the paper, is wrong for R < 0: the minimum is taken after multiplying.",
        _REINFORCE,
    ),
    "reinforce-mean-zero": Preset(
        "REINFORCE with the group's mean as baseline",
        _MINIMALIST,
        f"A = R − mean of the group; {_CLIP}",
        "All-correct and all-wrong groups get exactly 0, not what float rounding leaves of the mean.",
        {**_REINFORCE, "advantage": "group-centred"},
    ),
    "reinforce-drop-correct": Preset(
        "REINFORCE without the groups that are all correct",
        _MINIMALIST,
        f"groups with every R = 1 are removed; A = R; {_CLIP}",
        "Removed means removed: setting A to 0 would leave their tokens in the denominator.",
        {**_REINFORCE, "filter": "all-correct"},
    ),
    "reinforce-drop-wrong": Preset(
        "REINFORCE without the groups that are all wrong",
        _MINIMALIST,
        f"groups with every R = −1 are removed; A = R; {_CLIP}",
        "Removed means removed: setting A to 0 would leave their tokens in the denominator.",
        {**_REINFORCE, "filter": "all-wrong"},
    ),
    "reinforce-rej": Preset(
        "REINFORCE without groups that are all correct or all wrong",
        _MINIMALIST,
        f"groups with equal R are removed; A = R; {_CLIP}",
        "The filter looks at raw correctness, before a length penalty could make equal scores differ.",
        {**_REINFORCE, "filter": "all-correct+all-wrong"},
    ),
    "reinforce-rej-std": Preset(
        "Reinforce-Rej, divided by the group's deviation",
        _MINIMALIST,
        f"groups with equal R are removed; A = R / (std + ε); {_CLIP}",
        "Not centred: one in four correct gives ±1, where GRPO gives 1.5 and −0.5.",
        {**_REINFORCE, "filter": "all-correct+all-wrong", "advantage": "group-scaled"},
    ),
    "raft": Preset(
        "Rejection sampling: likelihood of the best answers",
        "RAFT, arXiv 2304.06767",
        "D = samples with R = max of the group and correct; ℓ = −log π(y), sum over tokens, mean over D",
        "'Equal to the maximum' accepts every answer of an all-wrong group: a correctness threshold is required.",
        {
            "filter": "keep-best",
            "advantage": "one",
            "gate": "likelihood",
            "correction": "none",
            "aggregation": "seq-mean-token-sum",
        },
    ),
    "raft++": Preset(
        "RAFT with importance ratio and clip, for several updates per batch",
        _MINIMALIST,
        f"D as in RAFT; A = 1; {_CLIP}; mean over tokens, then over D",
        "Rejected answers leave the batch: with advantage 0 they would count in the mean (−0.32, not −0.95).",
        {**_SEQ, "filter": "keep-best", "advantage": "one"},
    ),
    "ppo": Preset(
        "Proximal policy optimisation with a critic",
        "PPO, arXiv 1707.06347",
        "reward_t = −β k1_t, plus R at the last token; A = GAE(γ, λ), whitened over all tokens; "
        f"{_CLIP}; critic: ½ max((V − G)², (clip(V, V_old ± c) − G)²)",
        "Returns use advantages before whitening. Tokens of an environment are skipped in GAE, not seen as reward 0.",
        {**_kl_in_reward(0.001), "advantage": {"name": "gae", "whiten": "tokens"}},
    ),
    "grpo": Preset(
        "Group relative policy optimisation",
        "DeepSeekMath, arXiv 2402.03300",
        f"A = (R − mean) / (std + ε) of the group; {_CLIP}; mean over tokens, then over responses",
        "The deviation is the sample one (ddof 1) and ε is added to it, not to the variance. No KL term: for the "
        "paper's add reference = 'frozen', kl = { name = 'k3', coef = 0.04 }.",
        {**_SEQ},
    ),
    "dr-grpo": Preset(
        "GRPO done right: no division by the group's spread, no length bias",
        "Understanding R1-Zero-like training, arXiv 2503.20783",
        f"A = R − mean of the group; {_CLIP}; sum over tokens / (B · L)",
        "Both halves are needed: the baseline alone, with a mean over tokens, keeps the length bias. L is a constant.",
        {"advantage": "group-centred", "aggregation": {"name": "constant-length", "length": "max_tokens"}},
    ),
    "dapo": Preset(
        "Decoupled clip, groups without signal dropped, token-level loss",
        "DAPO, arXiv 2503.14476",
        "groups with equal scores are dropped (and replaced: pipeline.refill); A as in GRPO; "
        "ℓ = max(−A r, −A clip(r, 0.8, 1.28)); mean over all tokens of the step",
        "The length penalty (off until overlong_buffer is set) starts at cap − buffer, the cap being the hard one; the "
        "filter sees scores before it. The paper's formula averages per group (prompt-mean), all code over the step.",
        {"filter": "zero-variance", "gate": {"clip_high": 0.28}},
    ),
    "gspo": Preset(
        "Group sequence policy optimisation",
        "GSPO, arXiv 2507.18071",
        "s = exp(mean_t log r_t) of the sequence; ℓ = max(−A s, −A clip(s, 1 − 3e-4, 1 + 4e-4)); mean over responses",
        "A token's clip of 0.2 never acts on s: more than 0.05 is refused. Token-mean would weight by length "
        "(0.565 instead of 0.174).",
        {**_SEQ, "ratio": "sequence-mean", "gate": {"clip_low": 3e-4, "clip_high": 4e-4}, "correction": "none"},
    ),
    "gspo-token": Preset(
        "GSPO with advantages that may differ by token",
        "GSPO, arXiv 2507.18071",
        "s_t = sg[s] π_θ(t) / sg[π_θ(t)], then as GSPO, averaged over tokens, then over responses",
        "Has exactly GSPO's gradient where advantages and weights are the same for all tokens of a response: hence no "
        "token weight in S6, and this aggregation.",
        {**_SEQ, "ratio": "sequence-mean-token", "gate": {"clip_low": 3e-4, "clip_high": 4e-4}, "correction": "none"},
    ),
    "rloo": Preset(
        "REINFORCE with leave-one-out baseline",
        "Back to basics, arXiv 2402.14740",
        "R' = R − β Σ_t k1_t; A = R' − mean of the others; ℓ = −A log π(y), sum over tokens, mean over responses",
        "One sample is left out, never one token. The penalty is summed over the response before the baseline.",
        {
            **_kl_in_reward(0.05),
            "advantage": "leave-one-out",
            "gate": "likelihood",
            "aggregation": "seq-mean-token-sum",
        },
    ),
    "remax": Preset(
        "REINFORCE with the greedy answer's reward as baseline",
        "ReMax, arXiv 2310.10505",
        "A_t = Σ_{u ≥ t} reward_u − R(greedy answer); ℓ = −A log π(y), sum over tokens, mean over responses",
        "The greedy answer comes from the same policy version, costs one decode per prompt, and is never trained on.",
        {
            **_kl_in_reward(0.001),
            "advantage": "greedy",
            "gate": "likelihood",
            "aggregation": "seq-mean-token-sum",
        },
    ),
    "reinforce++": Preset(
        "Critic-free PPO: returns whitened over the whole batch",
        "REINFORCE++, arXiv 2501.03262",
        f"reward_t = −β k1_t, + R at the last token; G_t = return to go; A = (G − mean) / std of all tokens; {_CLIP}",
        "Penalty, then return, then whitening, once on the whole batch: not per mini-batch or rank.",
        {**_kl_in_reward(0.001), "advantage": {"name": "returns", "whiten": "tokens"}},
    ),
    "reinforce++-baseline": Preset(
        "Group mean as baseline, then batch normalisation",
        "REINFORCE++, arXiv 2501.03262",
        f"A' = R − mean of the group; A = A' / std over the samples of the batch; {_CLIP}; + β k2",
        "Statistics of tokens would give groups without signal a positive advantage (0.39): samples count once each, "
        "and their mean, 0 by construction, is not subtracted.",
        {
            "advantage": {"name": "group-centred", "whiten": "scale"},
            "kl": {"coef": 0.001},
            "reference": "frozen",
        },
    ),
    "cispo": Preset(
        "Clipped importance weights, no clipped gradients",
        "MiniMax-M1, arXiv 2506.13585; cap of ScaleRL, arXiv 2510.13786",
        "A as in GRPO; ℓ = −sg[min(r, 5)] A log π; mean over all tokens",
        "The cap is an absolute ratio and must be at least 1: read as 0.2 it would shrink every update to a fifth.",
        {"filter": "zero-variance", "gate": "weight-clip"},
    ),
    "sapo": Preset(
        "Soft gate instead of a clip",
        "SAPO, arXiv 2511.20347",
        "A as in GRPO; ℓ = −A (4/τ) σ(τ (r − 1)), τ = 1 where A > 0, else 1.05; mean over tokens, then responses",
        "The loss at r = 1 is −2A/τ: read the gradient, not the value. The gate still grows until r ≈ 2.06.",
        {**_SEQ, "gate": "sigmoid"},
    ),
    "minirl": Preset(
        "Masked policy gradient with the total importance weight",
        "Stabilizing RL with LLMs (MiniRL), arXiv 2512.01374",
        "A = R − mean; ℓ = −M sg[min(ρ, 5)] A log π, ρ = π_θ/μ, M by r = π_θ/π_old; sum over tokens, mean of responses",
        "The cap acts on ρ, not on w = π_old/μ. A sum over tokens grows with the length: tune the learning rate.",
        {
            "advantage": "group-centred",
            "gate": {"name": "mask", "clip_high": 0.27},
            "correction": {"name": "total", "cap": 5.0},
            "aggregation": "seq-mean-token-sum",
        },
    ),
    "olmorl": Preset(
        "OlmoRL: centred advantages, clip-higher, truncated importance sampling",
        "Olmo 3",
        "A = R − mean; ℓ = min(w, 2) max(−A r, −A clip(r, 0.8, 1.272)); mean over all tokens",
        "The weight w is truncated once. Groups without signal are dropped (and replaced: pipeline.refill).",
        {"filter": "zero-variance", "advantage": "group-centred", "gate": {"clip_high": 0.272}},
    ),
    "decoupled-ppo": Preset(
        "Clip against the proximal policy, weight by the behaviour policy",
        "AReaL, arXiv 2505.24298; Batch size-invariance, arXiv 2110.00641",
        "A as in GRPO, over its deviation in the batch; ℓ = min(w, 5) max(−A r, −A clip(r, 0.8, 1.2)), w per token",
        "Without w this is plain PPO, whatever it is called. μ is stored per token: a response may span versions. The "
        "KL penalty of AReaL's default is off.",
        {"advantage": {"whiten": "scale"}, "correction": {"cap": 5.0}},
    ),
    "stale-asymmetric": Preset(
        "Trajectory weights that treat good and bad stale samples differently",
        "after TOPR, arXiv 2503.14286; constants from a practitioner's work log",
        "ρ = Π_t π_θ/μ; W = min(ρ, 10) where A > 0, clip(ρ, 0.5, 1) where A < 0; ℓ = −sg[W] A log π",
        "The floor would lift what the policy has given up: responses with ρ < 0.001 are rejected. A ratio to μ "
        "excludes a correction weight.",
        {
            "ratio": {"name": "sequence-product", "anchor": "behaviour"},
            "gate": {"name": "asymmetric", "weight_floor": 0.5, "weight_cap": 10.0, "reject_below": 1e-3},
            "correction": "none",
        },
    ),
    "maxrl": Preset(
        "Maximum-likelihood RL: advantages over the mean success rate",
        "Maximum likelihood reinforcement learning, 2026",
        f"A = (R − mean) / (mean + ε) of the group; {_CLIP}; mean over all tokens",
        "Needs rewards that are not negative; a group without any success gives 0.",
        {"advantage": "mean-scaled"},
    ),
    "gmpo": Preset(
        "Geometric-mean policy optimisation",
        "GMPO, arXiv 2507.20673",
        "A as in GRPO; ℓ = −A exp(mean_t log r̄_t), log r̄ clipped to [−0.4, 0.4] by the sign of A; mean over responses",
        "The clip is on log-ratios of tokens, inside the mean; clipping the mean would be GSPO. The mean spreads "
        "the weight of one token over all: hence no token weight in S6.",
        {**_SEQ, "gate": {"name": "geometric-clip", "clip_low": 0.4, "clip_high": 0.4}, "correction": "none"},
    ),
    "opo": Preset(
        "On-policy with the baseline of least variance",
        "OPO, arXiv 2505.23585",
        "A = R − Σ l R / Σ l over the group, l the length; ℓ = −A log π(y); mean over all tokens",
        "Exactly on-policy: no ratio and no clip, so it wants one update per batch.",
        {"advantage": "length-weighted", "gate": "likelihood"},
    ),
    "pass-at-k": Preset(
        "Reward for the group's chance that one of k answers is correct",
        "Pass@k training, arXiv 2508.10751",
        f"A by counting, with c of G correct and k = 4; {_CLIP}; mean over all tokens",
        "When fewer than k answers are wrong every draw of k succeeds, and the group has no signal left.",
        {"advantage": "pass-at-k"},
    ),
    "scalerl": Preset(
        "ScaleRL: CISPO averaged per prompt, advantages scaled over the batch",
        "The art of scaling RL compute, arXiv 2510.13786",
        "A = (R − mean of the group) / std over the batch; ℓ = −sg[min(r, 5)] A log π; mean per prompt, then overall",
        "Length penalties come from forced interruption in the paper; here overlong_buffer is the nearest.",
        {
            "filter": "zero-variance",
            "advantage": {"name": "group-centred", "whiten": "scale"},
            "gate": "weight-clip",
            "aggregation": "prompt-mean",
        },
    ),
    "icepop": Preset(
        "GRPO that discards tokens on which engine and trainer disagree",
        "Ring-1T, arXiv 2510.18855",
        f"A as in GRPO; {_CLIP}, times w where 0.5 ≤ w ≤ 5, else 0; mean over tokens, then over responses",
        "Masked tokens stay in the denominator; dividing by the survivors would weight them up (1.1, not 0.917).",
        {**_SEQ, "correction": "icepop"},
    ),
    "sequence-mask": Preset(
        "GRPO that discards responses on which engine and trainer disagree",
        "Your efficient RL framework secretly brings you off-policy training, 2025",
        f"A as in GRPO; {_CLIP}, times Π w where that is at most 3, else 0",
        "A product over a long response works like a length filter: 1.01 to the power of 4,096 is 5e17.",
        {**_SEQ, "correction": {"name": "sequence-mask", "cap": 3.0}},
    ),
    "opsm": Preset(
        "GRPO that drops wrong responses the policy has moved away from",
        "DeepSeek-V3.2, arXiv 2512.02556",
        f"A as in GRPO; {_CLIP}, times min(w, 2), times 0 where A < 0 and mean_t(log μ − log π_θ) > δ",
        "The mean of log μ − log π_θ is one sample of a KL and can be negative: nothing is masked then.",
        {**_SEQ, "correction": "tis+opsm"},
    ),
    "dppo": Preset(
        "Trust region by divergence instead of by ratio",
        "Rethinking the trust region in LLM RL, arXiv 2602.04879",
        "r = π_θ/μ; ℓ = −M A r, M = 0 where r moves on in the direction of A and |π_θ − μ| > 0.15; mean of all tokens",
        "The ratio is taken to μ, so a correction weight would count the mismatch twice.",
        {"ratio": {"anchor": "behaviour"}, "gate": "divergence-mask", "correction": "none"},
    ),
    "entropy-control": Preset(
        "GRPO with an entropy bonus that holds a target",
        "after Skywork-OR1, arXiv 2505.22312",
        f"A as in GRPO; {_CLIP}; − α H while H is below its target, with α raised then and lowered while it is above",
        "The bonus acts on the entropy of the whole distribution, with its gradient, not on −log π of the sample.",
        {"filter": "zero-variance", "entropy": {"coef": 0.005, "target": 0.2}},
    ),
    "clip-cov": Preset(
        "GRPO that stops the few tokens which take most of the entropy",
        "after The entropy mechanism of RL for reasoning language models, arXiv 2505.22617",
        f"A as in GRPO; {_CLIP}; ℓ = 0 for the 0.02 % of tokens with the highest (log μ − mean) (A − mean); mean of "
        "all tokens",
        "Elsewhere the tokens are drawn at random from a band of covariances, with the means of a micro-batch; here "
        "they are the highest of the whole step, so that no cut changes the gradient.",
        {"gate": "clip-cov"},
    ),
    "kl-cov": Preset(
        "Policy gradient that holds the few tokens which take most of the entropy",
        "after The entropy mechanism of RL for reasoning language models, arXiv 2505.22617",
        "A as in GRPO; ℓ = −A r, plus |log r| for the 0.2 % of tokens with the highest (log μ − mean) (A − mean); mean "
        "of all tokens",
        "With one update per batch r is 1 and nothing is held: it needs several.",
        {"gate": {"name": "kl-cov", "cov_share": 2e-3}},
    ),
    "turn-ppo": Preset(
        "PPO over turns, with the critic's value before each turn",
        "after Turn-PPO, arXiv 2512.17008; ArCHer, arXiv 2402.19446",
        f"A_k = δ_k + γ λ A_{{k+1}}, δ_k = r_k + γ V_{{k+1}} − V_k over turns, whitened over all tokens; {_CLIP}; "
        "critic: all tokens of a turn predict A_k + V_k; mean over tokens, then over episodes",
        "A mean over all tokens would count long episodes more. The KL of a turn's tokens is part of its reward.",
        {**_kl_in_reward(0.001), **_SEQ, "advantage": {"name": "turn-gae", "whiten": "tokens"}},
    ),
    "gigpo": Preset(
        "Group-in-group policy optimisation: episodes compared, and turns from equal states",
        "GiGPO, arXiv 2505.10978",
        "A = A_episode + ω A_step; A_episode as in GRPO; A_step = z-score of G_k = Σ_{j ≥ k} γ^{j − k} r_j among the "
        f"group's turns from an equal state; {_CLIP}; mean over tokens, then over episodes",
        "A state that was met once has A_step 0, not its return. Where nothing is met twice this is GRPO: name states "
        "(Observation.state) where what is said differs and the state does not.",
        {**_SEQ, "advantage": "gigpo"},
    ),
    "mt-grpo": Preset(
        "Multi-turn GRPO: a turn's own reward beside that of the outcome",
        "Reinforcing multi-turn reasoning, arXiv 2505.11821",
        "A_k = z(outcome) + c z(r_k among the group's k-th turns), the last turn z(outcome) alone; outcome: the reward "
        f"of the last turn; {_CLIP}; mean over tokens, then over episodes",
        "The paper has two turns; here it holds for each turn but the last. Rewards of later turns but the last do not "
        "reach back: that is what returns do.",
        {**_SEQ, "advantage": "mt-grpo"},
    ),
    "rae": Preset(
        "Self-play: rewards less the moving mean of their role",
        "SPIRAL, arXiv 2506.24119",
        f"A = R − b_role, b_role ← 0.95 b_role + 0.05 R after it; {_CLIP}; mean over tokens, then over responses",
        "The mean is taken before R moves it. It is part of a checkpoint, and begins at 0. Groups need not have peers.",
        {**_SEQ, "advantage": "role-mean"},
    ),
    "distil": Preset(
        "On-policy distillation: the reverse KL to a teacher as advantage",
        "MiniLLM, arXiv 2306.08543; as the only signal: Qwen3, arXiv 2505.09388",
        f"A = log π_teacher − log π_old of each token; {_CLIP}; mean of all tokens",
        "The teacher is scored at the temperature of the rollouts: else the student is pulled to another distribution "
        "than the one it is compared with.",
        {"advantage": "reverse-kl"},
    ),
    "gkd": Preset(
        "Generalised knowledge distillation: a divergence from the teacher, on the student's own samples",
        "On-policy distillation of language models, arXiv 2306.13649",
        "ℓ = β KL(π_teacher ‖ m) + (1 − β) KL(π_θ ‖ m), m = β π_teacher + (1 − β) π_θ, over the whole vocabulary; mean "
        "of all tokens",
        "There is no gradient through the sampling: with β = 1 it is the reverse KL of each token, as in distil, but "
        "summed over the vocabulary and not estimated from one token.",
        {"advantage": "one", "gate": "divergence"},
    ),
}
