"""What the log says of a refused call: who, from where, which request and why, never the key. Lines are rationed, so that
nobody, least of all callers without a key, can fill the disk with refusals."""

from __future__ import annotations

import logging

from fairlane.clock import Clock
from fairlane.errors import FairlaneError
from fairlane.gateway.auth import Identity, Unauthenticated

logger = logging.getLogger("fairlane.gateway.refusals")

_MAX_FIELD = 128


class Ration:
    """A token bucket of log lines: `burst` at once, `per_s` in the long run."""

    def __init__(self, clock: Clock, per_s: float, burst: int) -> None:
        self._clock = clock
        self._per_s = per_s
        self._burst = burst
        self._left = float(burst)
        self._filled_s = clock.now()
        self._suppressed = 0

    def take(self) -> int | None:
        """How many lines were suppressed before this one; None if this one is suppressed too."""
        now_s = self._clock.now()
        self._left = min(self._burst, self._left + (now_s - self._filled_s) * self._per_s)
        self._filled_s = now_s
        if self._left < 1:
            self._suppressed += 1
            return None
        self._left -= 1
        suppressed, self._suppressed = self._suppressed, 0
        return suppressed


class RefusalLog:
    """Strangers (no identity) have a small ration of their own, so that they cannot hide what happens to tenants."""

    def __init__(self, clock: Clock) -> None:
        self._strangers = Ration(clock, per_s=2.0, burst=20)
        self._tenants = Ration(clock, per_s=20.0, burst=200)

    def refused(self, method: str, error: FairlaneError, caller: Identity | None, request_id: str, peer: str) -> None:
        suppressed = (self._strangers if caller is None else self._tenants).take()
        if suppressed is None:
            return
        logger.info(
            "%s: %s %s%s; node %s, key %s, request %s, peer %s%s",
            method,
            error.code.value,
            error.reason,
            f" ({error.cause})" if isinstance(error, Unauthenticated) else "",
            "-" if caller is None else caller.node,
            "-" if caller is None else caller.key_id,
            _plain(request_id) or "-",
            _plain(peer) or "-",
            f" ({suppressed} more refusals were not logged)" if suppressed else "",
        )


def _plain(text: str) -> str:
    """A client's text as one short printable word: it must not be able to forge a line."""
    word = ascii(text[:_MAX_FIELD])[1:-1]
    return word.replace(" ", "\\x20") + ("…" if len(text) > _MAX_FIELD else "")
