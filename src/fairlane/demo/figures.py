"""The few figures of a server's /metrics that the demo shows: who holds how many KV blocks, and which policy is in force."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from fairlane.demo.board import Board

_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Figures:
    """blocks_by_tenant: used blocks. sha256: the first hex digits of the policy in force. failures: policies refused so far."""

    blocks: int
    blocks_by_tenant: Mapping[str, int]
    generation: int
    tiers: str
    sha256: str
    failures: int = 0


async def fetch(metrics: str) -> Figures | None:
    """Of the server whose metrics are at HOST:PORT; None when it does not answer."""
    return await asyncio.to_thread(_fetch, metrics) if metrics else None


def _fetch(metrics: str) -> Figures | None:
    try:
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=_TIMEOUT_S) as answer:
            return parse(answer.read().decode())
    except (OSError, ValueError):
        return None


def parse(text: str) -> Figures:
    """Raises ValueError for what is not Prometheus text."""
    from prometheus_client.parser import text_string_to_metric_families

    blocks, generation, failures, tiers, sha256 = 0, 0, 0, "", ""
    by_tenant: dict[str, int] = {}
    # Parsing all of it takes longer than everything else here; these lines are a handful.
    wanted = "\n".join(line for line in text.splitlines() if line.startswith(("fairlane_kv_blocks", "fairlane_policy")))
    for family in text_string_to_metric_families(wanted + "\n"):
        for sample in family.samples:
            if sample.name == "fairlane_kv_blocks":
                blocks += int(sample.value)
            elif sample.name == "fairlane_kv_blocks_by_domain":
                by_tenant[sample.labels["domain"].removeprefix("tenant:")] = int(sample.value)
            elif sample.name == "fairlane_policy_generation":
                generation = int(sample.value)
            elif sample.name == "fairlane_policy_reload_failures_total":
                failures = int(sample.value)
            elif sample.name == "fairlane_policy_info":
                tiers, sha256 = sample.labels["tiers"], sample.labels["sha256"]
    return Figures(blocks, by_tenant, generation, tiers, sha256, failures)


def show(figures: Figures | None, board: Board) -> None:
    """Puts them on the board; what is not known stays as it was, KV shares become unknown."""
    known = figures is not None and set(figures.blocks_by_tenant) != {"other"}  # a worker that does not tell domains apart
    for lane in board.lanes:
        lane.kv_blocks = figures.blocks_by_tenant.get(lane.load.tenant, 0) if figures is not None and known else None
    if figures is not None:
        board.blocks, board.generation, board.tiers = figures.blocks, figures.generation, figures.tiers
