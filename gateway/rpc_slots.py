"""How many calls of one kind may be in progress at once. Whoever holds no slot is refused with a delay; which calls are of one
kind is decided by who owns the slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fairlane.errors import FairlaneError
from fairlane.gateway.admission import retry_after_s


class RpcSlots:
    """Single-threaded: the event loop's. `kind` is said in refusals: "calls", "health watchers"."""

    def __init__(self, limit: int, kind: str) -> None:
        self._limit = limit
        self._kind = kind
        self.used = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Around a call. Raises OVERLOADED if all slots are taken."""
        if self.used >= self._limit:
            message = f"this gateway serves {self._limit} {self._kind}, its most"
            raise FairlaneError("OVERLOADED", message, retry_after_s=retry_after_s())
        self.used += 1
        try:
            yield
        finally:
            self.used -= 1
