"""Losses by name, for the tokens of one datum: what a client of the training server may ask for.

Each is a sum over the tokens of a datum, nothing is averaged. p is the policy that is trained, q what sampled the
token (the input `logprobs`), A the input `advantages`, r = p / q:

    cross_entropy         −w log p, with the input `weights`, 1 where there is none
    importance_sampling   −A r
    ppo                   −min(A r, A clip(r, low, high))
    cispo                 −sg[clip(r, low, high)] A log p
    dro                   −(A log p − β/2 (log r)²)
    gspo                  ppo with r of the sequence, the geometric mean over the tokens of `sequence_ratio_mask`, which
                          carries the gradient of each token's own log p
    stable_reinforce      −sg[min(r, high)] A log p + k/2 (log r)², k the number `kl_coeff`: the service that made up
                          the name does not publish its formula, so this one is Kitae's

`clip_low_threshold` and `clip_high_threshold` are ratios, 0.8 and 1.2 where nothing is said; in a datum they are inputs
for each token. Tokens without advantage count nothing, whatever q was.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from kitae.algorithms.loss_tokens import bounded_exp, log_ratio
from kitae.errors import RequestError

Settings = Mapping[str, float]
Inputs = Mapping[str, Tensor]
TokenLoss = Callable[[Tensor, Inputs, Settings], Tensor]
"""(log-probs, inputs of the same shape, settings) → the loss of each token."""

_LOW, _HIGH, _BETA, _CAP = 0.8, 1.2, 0.05, 2.0


def cross_entropy(logp_N: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -logp_N * inputs["weights"] if "weights" in inputs else -logp_N


def importance_sampling(logp_N: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -inputs["advantages"] * bounded_exp(_log_ratio(logp_N, inputs))


def ppo(logp_N: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return _clipped(bounded_exp(_log_ratio(logp_N, inputs)), inputs, settings)


def cispo(logp_N: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    low_N, high_N = _band(inputs, settings)
    ratio_N = bounded_exp(_log_ratio(logp_N.detach(), inputs))
    return -ratio_N.maximum(low_N).minimum(high_N) * inputs["advantages"] * logp_N


def dro(logp_N: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    apart_N = _log_ratio(logp_N, inputs)
    return -(logp_N * inputs["advantages"] - 0.5 * settings.get("beta", _BETA) * apart_N**2)


def gspo(logp_N: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    counted_N = inputs["sequence_ratio_mask"] != 0 if "sequence_ratio_mask" in inputs else inputs["advantages"] != 0
    if not counted_N.any():
        return 0.0 * logp_N
    mean = _log_ratio(logp_N.detach(), inputs)[counted_N].mean()
    return _clipped(bounded_exp(mean) * (logp_N - logp_N.detach()).exp(), inputs, settings)


def stable_reinforce(logp_N: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    ratio_N = bounded_exp(_log_ratio(logp_N.detach(), inputs))
    loss_N = -ratio_N.clamp(max=settings.get("clip_high_threshold", _CAP)) * inputs["advantages"] * logp_N
    coefficient = settings.get("kl_coeff", 0.0)
    if not coefficient:
        return loss_N
    return loss_N + 0.5 * coefficient * (inputs["advantages"] != 0) * _log_ratio(logp_N, inputs) ** 2


def _log_ratio(logp_N: Tensor, inputs: Inputs) -> Tensor:
    return log_ratio(logp_N, inputs["logprobs"])


def _band(inputs: Inputs, settings: Settings) -> tuple[Tensor, Tensor]:
    usual = {"clip_low_threshold": _LOW, "clip_high_threshold": _HIGH} | dict(settings)
    like = inputs["advantages"]
    low_N, high_N = (
        inputs[name] if name in inputs else like.new_full((), usual[name])
        for name in ("clip_low_threshold", "clip_high_threshold")
    )
    return low_N, high_N


def _clipped(ratio_N: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    low_N, high_N = _band(inputs, settings)
    advantage_N = inputs["advantages"]
    return -(advantage_N * ratio_N).minimum(advantage_N * ratio_N.maximum(low_N).minimum(high_N))


_RL = ("logprobs", "advantages")
_BAND = ("clip_low_threshold", "clip_high_threshold")
_KNOWN: dict[str, tuple[TokenLoss, tuple[str, ...], tuple[str, ...]]] = {
    # name: function, inputs that it needs, settings that it reads
    "cross_entropy": (cross_entropy, (), ()),
    "importance_sampling": (importance_sampling, _RL, ()),
    "ppo": (ppo, _RL, _BAND),
    "cispo": (cispo, _RL, _BAND),
    "dro": (dro, _RL, ("beta",)),
    "gspo": (gspo, _RL, _BAND),
    "stable_reinforce": (stable_reinforce, _RL, ("clip_high_threshold", "kl_coeff")),
}
LOSSES = tuple(_KNOWN)


def find_loss(name: str, settings: Settings) -> tuple[TokenLoss, tuple[str, ...]]:
    """The loss, and the inputs that each datum must have. Raises `RequestError` for what nobody reads."""
    if name not in _KNOWN:
        raise RequestError(f"the loss must be one of {', '.join(LOSSES)}, got {name!r}")
    function, needs, reads = _KNOWN[name]
    if wrong := sorted(settings.keys() - set(reads)):
        known = ", ".join(reads) or "no settings"
        raise RequestError(f"the loss {name} reads {known}, got {wrong[0]!r}")
    return function, needs
