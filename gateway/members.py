"""Which members of each tenant are known right now. Members have no entry in the policy: one is known from its first admitted
request until it has been idle for an hour, and a tenant has at most as many as its template says. Memory is bounded by that."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from fairlane.clock import Clock
from fairlane.errors import FairlaneError

IDLE_S = 3600.0


class Members:
    """in_flight: requests in flight by node path, as Admission counts them; a member with any is not forgotten."""

    def __init__(self, clock: Clock, in_flight: Mapping[str, int]) -> None:
        self._clock = clock
        self._in_flight = in_flight
        # By tenant: member path to when it was last admitted, the longest idle first.
        self._known: dict[str, OrderedDict[str, float]] = {}

    def seen(self, path: str, max_members: int) -> None:
        """A request of this member is being admitted. Raises MAX_MEMBERS for a new one above the tenant's most; an old one is
        never refused, also above a lowered limit. Costs amortised O(1)."""
        tenant = path.rpartition("/")[0]
        known = self._known.get(tenant)
        if known is None:
            known = self._known[tenant] = OrderedDict()
        now_s = self._clock.now()
        if path not in known:
            self._forget(known, now_s)
            if len(known) >= max_members:
                raise FairlaneError(
                    "MAX_MEMBERS",
                    f"{tenant} has {max_members} active members, its most",
                    metadata={"node": tenant, "limit": str(max_members)},
                    retry_after_s=60.0,
                )
        known[path] = now_s
        known.move_to_end(path)

    def count(self, tenant: str) -> int:
        return len(self._known.get(tenant, ()))

    def keep_only(self, tenants: Mapping[str, object]) -> None:
        """Forgets the members of tenants that are gone."""
        for tenant in [name for name in self._known if name not in tenants]:
            del self._known[tenant]

    def _forget(self, known: OrderedDict[str, float], now_s: float) -> None:
        while known:
            path, seen_s = next(iter(known.items()))
            if now_s - seen_s < IDLE_S:
                return
            if self._in_flight.get(path):
                known[path] = now_s
                known.move_to_end(path)
            else:
                del known[path]
