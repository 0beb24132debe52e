"""S4, importance ratios. Log-ratios are clamped to ±20 before the exponential."""

from collections.abc import Callable, Mapping

from torch import Tensor

_LIMIT = 20.0


def token_ratio(logp_N: Tensor, logp_reference_N: Tensor) -> Tensor:
    """π_θ / π_reference of each token."""
    return (logp_N - logp_reference_N).clamp(-_LIMIT, _LIMIT).exp()


RATIOS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"token": token_ratio}
