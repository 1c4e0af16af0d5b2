"""What operators decide at night and what beats the policy file: suspended nodes, paused tiers, revoked keys. Each may expire,
is kept over a restart, and leaves one line in the audit log; what a refused caller is told is the services' business."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from fairlane.errors import ConfigError
from fairlane.gateway.private_files import read_private, write_private
from fairlane.gateway.tree import lineage

audit_log = logging.getLogger("fairlane.audit")
logger = logging.getLogger("fairlane.gateway.overrides")

FILE = "overrides.json"


class Kind(Enum):
    SUSPEND_NODE = "suspend_node"
    PAUSE_TIER = "pause_tier"
    REVOKE_KEY = "revoke_key"


@dataclass(frozen=True, slots=True)
class Override:
    """One decision. Times are seconds since the epoch, because they must mean the same after a restart.

    target: a node path, a tier name or a key's hash. label: what people call it (a key's id). until_s: None: until lifted.
    """

    kind: Kind
    target: str
    label: str
    by: str
    since_s: float
    until_s: float | None = None

    def expired(self, now_s: float) -> bool:
        return self.until_s is not None and now_s >= self.until_s


class Overrides:
    """The overrides in force. Single-threaded, except `save`, which may run on any thread.

    A change is in force when the call returns; whether it also survives a restart is what `save` answers.
    """

    def __init__(self, state_dir: Path | None = None, wall: Callable[[], float] = time.time) -> None:
        """Takes up what `state_dir` holds; None: nothing is kept. Raises ConfigError for a damaged file: starting without it
        would quietly lift what an operator has put in force."""
        self._path = None if state_dir is None else state_dir / FILE
        self._wall = wall
        self._entries: dict[tuple[Kind, str], Override] = {}
        if self._path is not None and self._path.exists():
            self._entries = {(entry.kind, entry.target): entry for entry in _parse(self._path)}

    def put(self, kind: Kind, target: str, *, by: str, for_s: float | None = None, label: str = "") -> Override:
        """In force from now on, for `for_s` seconds or until it is lifted; replaces an earlier one of the same target."""
        now_s = self._wall()
        entry = Override(kind, target, label or target, by, now_s, None if for_s is None else now_s + for_s)
        self._entries[kind, target] = entry
        audit(kind.value, entry.label, by, until=entry.until_s)
        return entry

    def lift(self, kind: Kind, target: str, *, by: str) -> bool:
        """Whether there was one to lift."""
        entry = self._find(kind, target)
        if entry is None:
            return False
        del self._entries[kind, target]
        audit(f"lift_{kind.value}", entry.label, by)
        return True

    def suspended(self, path: str) -> Override | None:
        """The suspension that covers a node: its own or that of a node above it."""
        return self._first(Kind.SUSPEND_NODE, lineage(path))

    def paused(self, tier: str) -> Override | None:
        return self._find(Kind.PAUSE_TIER, tier)

    def revoked(self, key_hash: str) -> Override | None:
        return self._find(Kind.REVOKE_KEY, key_hash)

    def active(self) -> tuple[Override, ...]:
        """Those in force, oldest first."""
        for kind, target in tuple(self._entries):
            self._find(kind, target)
        return tuple(sorted(self._entries.values(), key=lambda entry: entry.since_s))

    def left_s(self, entry: Override) -> float | None:
        """Seconds until it expires; None: it does not."""
        return None if entry.until_s is None else max(0.0, entry.until_s - self._wall())

    def save(self) -> bool:
        """Writes them to disk. False if that failed: they hold until this process ends, and the log says why."""
        if self._path is None:
            return True
        entries = [dataclasses.asdict(entry) | {"kind": entry.kind.value} for entry in tuple(self._entries.values())]
        try:
            write_private(self._path, json.dumps({"overrides": entries}, indent=1) + "\n")
        except OSError as error:
            logger.error("overrides are in force but will not survive a restart: %s: %s", self._path, error.strerror)
            return False
        return True

    def _first(self, kind: Kind, targets: tuple[str, ...]) -> Override | None:
        if not self._entries:  # the ordinary day, once per request
            return None
        return next((entry for target in targets if (entry := self._find(kind, target)) is not None), None)

    def _find(self, kind: Kind, target: str) -> Override | None:
        entry = self._entries.get((kind, target))
        if entry is None or not entry.expired(self._wall()):
            return entry
        del self._entries[kind, target]
        audit(f"expired_{kind.value}", entry.label, entry.by)
        return None


def audit(action: str, target: str, by: str, *, until: float | None = None, **more: str | int) -> None:
    """One line, as JSON, so that it can be found and counted: who did what to what, until when."""
    line: dict[str, object] = {"action": action, "target": target, "by": by}
    if until is not None:
        line["until"] = datetime.fromtimestamp(until, UTC).isoformat(timespec="seconds")
    audit_log.info("%s", json.dumps(line | more))


def _parse(path: Path) -> list[Override]:
    try:
        entries = json.loads(read_private(path))["overrides"]
        return [_override(entry) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    raise ConfigError([f"{path}: is damaged: repair it, or delete it to start without the overrides it holds"])


def _override(entry: dict[str, object]) -> Override:
    texts = [entry[name] for name in ("target", "label", "by")]
    since_s, until_s = entry["since_s"], entry["until_s"]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a text is needed")
    if not isinstance(since_s, int | float) or not (until_s is None or isinstance(until_s, int | float)):
        raise TypeError("a time is needed")
    target, label, by = (str(text) for text in texts)
    return Override(Kind(entry["kind"]), target, label, by, float(since_s), None if until_s is None else float(until_s))
