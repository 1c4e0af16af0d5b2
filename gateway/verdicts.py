"""What an operator's overrides mean to a caller: which requests they turn away, and with which words. What is overridden is
overrides.py's; the policy's own limits are admission.py's."""

from __future__ import annotations

from fairlane.errors import FairlaneError
from fairlane.gateway.admission import retry_after_s
from fairlane.gateway.overrides import Override, Overrides

_LONGEST_RETRY_S = 60.0
_PATIENT = 10  # times the usual delay, where nobody knows how long it takes


def suspended() -> FairlaneError:
    return FairlaneError("SUSPENDED", "this tenant is suspended")


def refuse_suspended(overrides: Overrides, node: str) -> None:
    """SUSPENDED if the node or one above it is."""
    if overrides.suspended(node) is not None:
        raise suspended()


def refuse_paused(overrides: Overrides, tier: str) -> None:
    """TIER_PAUSED if the tier is."""
    paused = overrides.paused(tier)
    if paused is not None:
        delay_s = _delay_s(overrides, paused)
        raise FairlaneError("TIER_PAUSED", f"tier {tier!r} is paused", metadata={"tier": tier}, retry_after_s=delay_s)


def _delay_s(overrides: Overrides, paused: Override) -> float:
    """Until it expires, within a minute; with jitter, so that those who wait do not come back together."""
    left_s = overrides.left_s(paused)
    return retry_after_s() * _PATIENT if left_s is None else min(left_s, _LONGEST_RETRY_S) + retry_after_s()
