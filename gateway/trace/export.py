"""From the recording to what `fairlane policy simulate --trace` reads: JSON lines in order of arrival, times from the first one
on, and names only where they are wanted. docs/operations.md describes the fields."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fairlane.gateway.request_end import CLIENT_GONE

# Ends by which the client says that it wants no more.
_CANCELS = frozenset({CLIENT_GONE, "CANCELLED"})
_KEPT = ("tier", "model", "prompt_tokens", "cached_tokens", "max_tokens", "max_wait_s", "deadline_s")
_MEASURED = ("queue_s", "ttft_s", "end_s", "end", "preemptions")
_COUNTS = ("prompt_tokens", "output_tokens", "cached_tokens", "max_tokens")
_LEVELS = ("org", "tenant", "member")

Skipped = Callable[[Path, int], None]


def export(
    lines: Iterable[tuple[Path, int, str]], *, since_s: float | None = None, anonymise: bool = False, skipped: Skipped
) -> Iterator[str]:
    """One line of JSON for each recorded request that arrived at or after `since_s` (seconds since the epoch).

    anonymise: nodes and models get names by a key that is made here and thrown away: equal names for equal nodes in this export,
    and no way back. skipped: told of every line that is no record, say one that a crash cut short.
    """
    found = []
    for path, number, text in lines:
        record = _record(text)
        if record is None:
            skipped(path, number)
        elif since_s is None or record["at"] >= since_s:
            found.append(record)
    found.sort(key=lambda record: record["at"])
    names = _Names(secrets.token_bytes(32)) if anonymise else None
    for record in found:
        yield json.dumps(_exported(record, found[0]["at"], names), separators=(",", ":"))


def _record(text: str) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except ValueError:
        return None
    is_sound = (
        isinstance(record, dict)
        and all(isinstance(record.get(name), str) for name in ("node", "tier", "model", "end"))
        and all(isinstance(record.get(name), int) for name in _COUNTS)
        and all(isinstance(record.get(name), int | float) for name in ("at", "end_s"))
    )
    return record if is_sound else None


def _exported(record: dict[str, Any], start_s: float, names: _Names | None) -> dict[str, Any]:
    values: dict[str, Any] = {"arrival_s": round(record["at"] - start_s, 6), "node": record["node"]}
    values |= {name: record[name] for name in _KEPT if name in record}
    # What a request that ended before its first token would have generated is not known; a load has no requests of nothing.
    values["output_tokens"] = max(1, record["output_tokens"])
    if record["end"] in _CANCELS:
        values["cancel_after_s"] = record["end_s"]
    values |= {name: record[name] for name in _MEASURED if name in record}
    values |= {name: record[name] for name in ("prefix_block", "prefix") if name in record}
    if names is not None:
        values["node"], values["model"] = names.node(record["node"]), names.name("model", record["model"])
    return values


class _Names:
    """Names by a keyed hash; a node's keeps its depth and its parents."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def node(self, path: str) -> str:
        parts = path.split("/")
        return "/".join(self.name(level, "/".join(parts[: end + 1])) for end, level in enumerate(_LEVELS[: len(parts)]))

    def name(self, what: str, text: str) -> str:
        return f"{what}-{hashlib.blake2b(text.encode(), key=self._key, digest_size=5).hexdigest()}"
