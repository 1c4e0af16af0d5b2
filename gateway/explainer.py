"""Why a request waits, for whoever may ask: the worker answers; how often it is asked, and who is named to whom, is decided
here."""

from __future__ import annotations

import asyncio

from fairlane.errors import FairlaneError
from fairlane.gateway import tree
from fairlane.gateway.admission import Ticket, retry_after_s
from fairlane.gateway.rpc_slots import RpcSlots
from fairlane.gateway.worker_client import WorkerClient
from fairlane.protos.fairlane.v1 import explain_pb2 as pb

# An answer costs the engine some milliseconds in which nobody gets a token.
_INTERVAL_S = 0.25
_QUEUED = 16


class Explainer:
    """One question at a time and four a second, whoever asks; a flood of them is OVERLOADED."""

    def __init__(self, worker: WorkerClient, interval_s: float = _INTERVAL_S) -> None:
        self._worker = worker
        self._interval_s = interval_s
        self._slots = RpcSlots(_QUEUED, "explanations")
        self._asking = asyncio.Lock()
        self._next_s = 0.0  # of the loop's time

    async def explain(self, ticket: Ticket) -> pb.Explanation:
        """With all names. Raises REQUEST_NOT_FOUND for a request that ends meanwhile, OVERLOADED."""
        if ticket.worker_id is None:
            return pb.Explanation(state=pb.Explanation.STATE_ARRIVED, tier=ticket.tier)
        with self._slots.hold():
            async with self._asking:
                loop = asyncio.get_running_loop()
                await asyncio.sleep(max(0.0, self._next_s - loop.time()))
                self._next_s = loop.time() + self._interval_s
                try:
                    found = await self._worker.explain(ticket.worker_id)
                except TimeoutError:
                    raise FairlaneError(
                        "OVERLOADED", "the worker did not answer in time", retry_after_s=retry_after_s()
                    ) from None
        if found is None:
            raise FairlaneError("REQUEST_NOT_FOUND", "no request with this request_id, of this node itself, is in flight")
        found.tier = ticket.tier
        return found


def for_tenant(found: pb.Explanation, node: str) -> pb.Explanation:
    """The same without the names of others: they are tiers and counts. `node` and those below it are no others."""
    shown = pb.Explanation()
    shown.CopyFrom(found)
    for parties in (shown.ahead, shown.holders):
        merged: dict[tuple[str, str], pb.Party] = {}
        for party in parties:
            name = party.node if tree.is_below(party.node, node) else ""
            into = merged.setdefault((party.tier, name), pb.Party(tier=party.tier, node=name))
            into.requests += party.requests
            into.evictable += party.evictable
        del parties[:]
        parties.extend(merged.values())
    for eviction in shown.evictions:
        if not tree.is_below(eviction.by_node, node):
            eviction.by_node = ""
    return shown
