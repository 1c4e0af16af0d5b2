"""Which tenants have time series of their own: the busiest few, and `other` for the rest, so that ten thousand tenants cost as
many series as twenty. What is measured about them is metrics.py's."""

from __future__ import annotations

from collections.abc import Callable

from fairlane.clock import Clock

OTHER = "other"
# Traffic halves in this time, so that "busiest" means lately.
_HALF_LIFE_S = 600.0
# Without a request for this long a tenant's series are dropped.
IDLE_S = 900.0
# How much busier than the quietest named tenant another must be to take its place: series must not change hands at every
# request of two equals.
_MARGIN = 2.0


def tenant_of(node: str) -> str:
    """The tenant of a node: members ("chatly/paid/alice") count for their tenant."""
    return "/".join(node.split("/", 2)[:2])


class TenantLabels:
    """Label values of tenants. Single-threaded: the event loop's, but for `label`, which only reads.

    most: how many tenants are named at a time. on_drop: told of a tenant that loses its name, to forget its series.
    """

    def __init__(self, most: int, clock: Clock, on_drop: Callable[[str], None] = lambda tenant: None) -> None:
        self._most = most
        self._clock = clock
        self._on_drop = on_drop
        self._traffic: dict[str, float] = {}
        self._in_flight: dict[str, int] = {}
        self._last_s: dict[str, float] = {}  # of named tenants: when a request began or ended
        self._decayed_s = clock.now()

    @property
    def named(self) -> tuple[str, ...]:
        return tuple(self._last_s)

    def label(self, tenant: str) -> str:
        """Its own name, or `other`; "" (nobody known) stays itself."""
        return tenant if not tenant or tenant in self._last_s else OTHER

    def enter(self, tenant: str) -> None:
        """A request of the tenant begins; it may be named now, in place of a quieter one."""
        self.sweep()
        self._in_flight[tenant] = self._in_flight.get(tenant, 0) + 1
        self.charge(tenant, 1)
        if tenant in self._last_s or self._has_room_for(tenant):
            self._last_s[tenant] = self._clock.now()

    def charge(self, tenant: str, amount: int) -> None:
        """Traffic of the tenant, in tokens."""
        self._traffic[tenant] = self._traffic.get(tenant, 0.0) + amount

    def leave(self, tenant: str) -> None:
        """A request of the tenant is over."""
        self._in_flight[tenant] -= 1
        if not self._in_flight[tenant]:
            del self._in_flight[tenant]
        if tenant in self._last_s:
            self._last_s[tenant] = self._clock.now()

    def sweep(self) -> None:
        """Drops idle tenants and lets old traffic fade. Cheap; called with every request and every scrape."""
        now_s = self._clock.now()
        for tenant, last_s in tuple(self._last_s.items()):
            if now_s - last_s >= IDLE_S and tenant not in self._in_flight:
                self._drop(tenant)
        while now_s - self._decayed_s >= _HALF_LIFE_S:
            self._decayed_s += _HALF_LIFE_S
            faded = {tenant: traffic / 2 for tenant, traffic in self._traffic.items()}
            self._traffic = {tenant: traffic for tenant, traffic in faded.items() if traffic >= 1 or tenant in self._last_s}

    def _has_room_for(self, tenant: str) -> bool:
        """Whether there is a place, after dropping the quietest named tenant if this one is much busier."""
        if len(self._last_s) < self._most:
            return True
        if not self._most:
            return False
        quietest = min(self._last_s, key=lambda name: self._traffic.get(name, 0.0))
        if self._traffic[tenant] <= _MARGIN * self._traffic.get(quietest, 0.0):
            return False
        self._drop(quietest)
        return True

    def _drop(self, tenant: str) -> None:
        del self._last_s[tenant]
        self._on_drop(tenant)
