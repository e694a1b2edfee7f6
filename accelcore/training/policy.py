"""Precision policies: what `precision=` in a trainer means in dtypes and scaling."""

from __future__ import annotations

from dataclasses import dataclass, replace

from accelcore.errors import ConfigurationError

__all__ = ["Policy", "choose_policy"]


@dataclass(frozen=True)
class Policy:
    """One precision of a whole training.

    Attributes:
        autocast: dtype of the forward pass under autocast, by torch's name; None runs it as the model is.
        loss_scale: None for none, a number for a static scale, `"dynamic"`.
    """

    autocast: str | None = None
    loss_scale: float | str | None = None

    def __post_init__(self) -> None:
        scale = self.loss_scale
        number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if scale is not None and scale != "dynamic" and not number:
            raise ConfigurationError(
                f"loss_scale={scale!r} makes no sense",
                available='a number, "dynamic", or None for the precision\'s own',
            )


_POLICIES = {
    "fp32": Policy(),
    "bf16": Policy(autocast="bfloat16"),  # fp32's range: small gradients need no scale
    "fp16": Policy(autocast="float16", loss_scale="dynamic"),
}


def choose_policy(precision: str | Policy, loss_scale: float | str | None) -> Policy:
    """The policy a trainer was asked for, with `loss_scale` in place of the policy's own where it is given.

    Raises:
        ConfigurationError: there is no such precision, or a loss scale that is neither a number nor `"dynamic"`.
    """
    policy = precision if isinstance(precision, Policy) else _POLICIES.get(str(precision))
    if policy is None:
        raise ConfigurationError(f"there is no precision {precision!r}", available=", ".join(_POLICIES))
    return policy if loss_scale is None else replace(policy, loss_scale=loss_scale)
