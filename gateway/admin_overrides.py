"""Admin's handlers for the night: suspended nodes, paused tiers, revoked keys, and single requests. They check that what is named
exists, so that a slip of the finger is not taken for done; what an override means to callers is verdicts.py's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fairlane.errors import FairlaneError, FieldViolation, InvalidRequest
from fairlane.gateway import tree
from fairlane.gateway.admin_parts import AdminParts, Context, operator, seconds, timestamp
from fairlane.gateway.admission import Ticket
from fairlane.gateway.auth import Unauthenticated, owner
from fairlane.gateway.overrides import Kind, Override, audit
from fairlane.gateway.verdicts import suspended
from fairlane.protos.fairlane.v1 import admin_pb2 as pb
from fairlane.protos.fairlane.v1 import admin_pb2_grpc, explain_pb2
from fairlane.wording import echo, suggestion

_LIST_DEFAULT, _LIST_MOST = 100, 1000
_KINDS = {
    Kind.SUSPEND_NODE: pb.Override.KIND_SUSPEND_NODE,
    Kind.PAUSE_TIER: pb.Override.KIND_PAUSE_TIER,
    Kind.REVOKE_KEY: pb.Override.KIND_REVOKE_KEY,
}


def override_message(entry: Override) -> pb.Override:
    message = pb.Override(kind=_KINDS[entry.kind], name=entry.label, since=timestamp(entry.since_s), by=entry.by)
    if entry.until_s is not None:
        message.until.CopyFrom(timestamp(entry.until_s))
    return message


class OverrideHandlers(admin_pb2_grpc.AdminServicer):
    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts
        self._saving = asyncio.Lock()

    async def ListOverrides(self, request: pb.ListOverridesRequest, context: Context) -> pb.ListOverridesResponse:
        return pb.ListOverridesResponse(overrides=[override_message(entry) for entry in self._parts.overrides.active()])

    async def SuspendNode(self, request: pb.SuspendNodeRequest, context: Context) -> pb.OverrideResponse:
        self._check_node(request.node)
        for_s = seconds(request.duration, given=request.HasField("duration"))
        entry = self._parts.overrides.put(Kind.SUSPEND_NODE, request.node, by=operator(context), for_s=for_s)
        aborted = 0
        if request.abort:
            aborted = self._abort(entry, suspended(), lambda ticket: tree.is_below(ticket.node, request.node))
        return await self._overridden(entry, aborted)

    async def ResumeNode(self, request: pb.ResumeNodeRequest, context: Context) -> pb.LiftResponse:
        return await self._lift(Kind.SUSPEND_NODE, request.node, context)

    async def PauseTier(self, request: pb.PauseTierRequest, context: Context) -> pb.OverrideResponse:
        self._check_tier(request.tier)
        for_s = seconds(request.duration, given=request.HasField("duration"))
        return await self._overridden(self._parts.overrides.put(Kind.PAUSE_TIER, request.tier, by=operator(context), for_s=for_s))

    async def ResumeTier(self, request: pb.ResumeTierRequest, context: Context) -> pb.LiftResponse:
        return await self._lift(Kind.PAUSE_TIER, request.tier, context)

    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: Context) -> pb.OverrideResponse:
        digest, key_id = self._key(request.key)
        for_s = seconds(request.duration, given=request.HasField("duration"))
        # By its hash: a new key under the same id is another key.
        entry = self._parts.overrides.put(Kind.REVOKE_KEY, digest, by=operator(context), for_s=for_s, label=key_id)
        aborted = 0
        if request.abort:
            aborted = self._abort(entry, Unauthenticated(f"key {key_id} was revoked"), lambda t: t.identity.key_hash == digest)
        return await self._overridden(entry, aborted)

    async def RestoreKey(self, request: pb.RestoreKeyRequest, context: Context) -> pb.LiftResponse:
        revoked = [entry for entry in self._parts.overrides.active() if entry.kind is Kind.REVOKE_KEY]
        digest = next((entry.target for entry in revoked if request.key in (entry.target, entry.label)), request.key)
        return await self._lift(Kind.REVOKE_KEY, digest, context)

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Context) -> pb.ListRequestsResponse:
        tickets = [
            ticket
            for ticket in self._parts.admission.tickets()
            if (not request.node or tree.is_below(ticket.node, request.node)) and request.tier in ("", ticket.tier)
        ]
        if not tickets:  # of what is gone from the policy something may be in flight still
            if request.node:
                self._check_node(request.node)
            if request.tier:
                self._check_tier(request.tier)
        limit = min(request.limit or _LIST_DEFAULT, _LIST_MOST)
        return pb.ListRequestsResponse(requests=[self._info(ticket) for ticket in tickets[:limit]], total=len(tickets))

    async def ExplainRequest(self, request: pb.ExplainRequestRequest, context: Context) -> explain_pb2.Explanation:
        return await self._parts.explainer.explain(self._parts.admission.find(request.node, request.request_id))

    async def CancelRequest(self, request: pb.CancelRequestRequest, context: Context) -> pb.CancelRequestResponse:
        ticket = self._parts.admission.find(request.node, request.request_id)
        ticket.cancel(FairlaneError("CANCELLED", "cancelled by the operator"))
        audit("cancel_request", ticket.request_id, operator(context), node=ticket.node)
        return pb.CancelRequestResponse()

    def _info(self, ticket: Ticket) -> pb.RequestInfo:
        return pb.RequestInfo(
            node=ticket.node,
            request_id=ticket.request_id,
            tier=ticket.tier,
            key_id=ticket.identity.key_id,
            started=ticket.started,
            age_s=self._parts.admission.age_s(ticket),
            policy_generation=ticket.identity.generation,
        )

    def _check_node(self, path: str) -> None:
        """It must be in the policy, or a possible member of a tenant that has members, or have requests in flight still."""
        node = self._parts.in_force.policy.nodes.get(owner(path))
        known = node is not None and (node.path == path or (node.members is not None and tree.is_well_formed(path)))
        if not known and path not in self._parts.admission.in_flight_by_node():
            meant = suggestion(path, list(self._parts.in_force.policy.nodes))
            raise FairlaneError("NODE_NOT_FOUND", f"the policy has no organisation, tenant or member {echo(path)}{meant}")

    def _check_tier(self, name: str) -> None:
        if name not in self._parts.in_force.policy.tiers:
            meant = suggestion(name, list(self._parts.in_force.policy.tiers))
            raise InvalidRequest([FieldViolation("tier", f"there is no tier {echo(name)}{meant}")], "TIER_UNKNOWN")

    def _key(self, name: str) -> tuple[str, str]:
        """The hash and the id of the key that `name`, either of them, means."""
        for digest, principal in self._parts.in_force.policy.principals.items():
            if name in (digest, principal.key_id):
                return digest, principal.key_id
        raise FairlaneError("KEY_NOT_FOUND", "the policy has no key of this id or hash")

    def _abort(self, entry: Override, error: FairlaneError, which: Callable[[Ticket], bool]) -> int:
        aborted = self._parts.admission.cancel_all(error, which)
        audit(f"abort_{entry.kind.value}", entry.label, entry.by, aborted=aborted)
        return aborted

    async def _overridden(self, entry: Override, aborted: int = 0) -> pb.OverrideResponse:
        return pb.OverrideResponse(override=override_message(entry), aborted=aborted, persisted=await self._save())

    async def _lift(self, kind: Kind, target: str, context: Context) -> pb.LiftResponse:
        lifted = self._parts.overrides.lift(kind, target, by=operator(context))
        return pb.LiftResponse(lifted=lifted, persisted=await self._save())

    async def _save(self) -> bool:
        async with self._saving:  # the last state is written last
            return await asyncio.to_thread(self._parts.overrides.save)
