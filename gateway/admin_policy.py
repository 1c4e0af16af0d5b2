"""Admin's handlers for the policy: read, check, apply, history, rollback. They ask; what applying means is reload.py's."""

from __future__ import annotations

import asyncio

from fairlane.errors import ConfigError, FairlaneError
from fairlane.gateway.admin_parts import AdminParts, Context, finding, operator, timestamp
from fairlane.gateway.overrides import audit
from fairlane.protos.fairlane.v1 import admin_pb2 as pb
from fairlane.protos.fairlane.v1 import admin_pb2_grpc


class PolicyHandlers(admin_pb2_grpc.AdminServicer):
    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts

    async def GetPolicy(self, request: pb.GetPolicyRequest, context: Context) -> pb.GetPolicyResponse:
        policy, generation = self._parts.in_force.policy, self._parts.in_force.generation
        return pb.GetPolicyResponse(text=policy.text, sha256=policy.sha256, generation=generation, path=policy.path)

    async def CheckPolicy(self, request: pb.CheckPolicyRequest, context: Context) -> pb.CheckPolicyResponse:
        from fairlane.gateway.policy.loader import load_policy_text  # pulls in the YAML loader, needed here only

        try:
            policy = await asyncio.to_thread(load_policy_text, request.text.encode(), request.name or "policy")
        except ConfigError as error:
            return pb.CheckPolicyResponse(ok=False, findings=[finding(text, error=True) for text in error.findings])
        return pb.CheckPolicyResponse(ok=True, findings=[finding(text, error=False) for text in policy.warnings])

    async def PlanPolicy(self, request: pb.PlanPolicyRequest, context: Context) -> pb.PlanPolicyResponse:
        from fairlane.gateway.plan_message import plan_policy  # as above

        policy, generation = self._parts.in_force.policy, self._parts.in_force.generation
        if policy.source is None:
            raise FairlaneError("POLICY_READ_ONLY", "this gateway's policy does not come from a file")
        tickets = self._parts.admission.tickets()
        answer = await asyncio.to_thread(plan_policy, policy, request.text.encode(), request.name or "policy", tickets)
        answer.generation = generation
        return answer

    async def ApplyPolicy(self, request: pb.ApplyPolicyRequest, context: Context) -> pb.ApplyPolicyResponse:
        return await self._replace(request.text, request.expected_sha256, "apply", context)

    async def RollbackPolicy(self, request: pb.RollbackPolicyRequest, context: Context) -> pb.ApplyPolicyResponse:
        entry = await asyncio.to_thread(self._parts.history.get, request.generation)
        if entry is None:
            known = [entry.generation for entry in await asyncio.to_thread(self._parts.history.entries)]
            there = "it is empty" if not known else f"it has {' to '.join(str(n) for n in sorted({min(known), max(known)}))}"
            raise FairlaneError("GENERATION_NOT_FOUND", f"the history has no generation {request.generation}: {there}")
        return await self._replace(entry.text, request.expected_sha256, f"rollback to {entry.generation}", context)

    async def ListPolicyHistory(self, request: pb.ListPolicyHistoryRequest, context: Context) -> pb.ListPolicyHistoryResponse:
        in_force = self._parts.in_force.generation
        entries = [
            pb.PolicyHistoryEntry(
                generation=entry.generation,
                sha256=entry.sha256,
                applied_at=timestamp(entry.applied_s),
                origin=entry.origin,
                in_force=entry.generation == in_force,
            )
            for entry in await asyncio.to_thread(self._parts.history.entries)
        ]
        return pb.ListPolicyHistoryResponse(entries=entries)

    async def _replace(self, text: str, expected_sha256: str, origin: str, context: Context) -> pb.ApplyPolicyResponse:
        if self._parts.reloader is None:
            raise FairlaneError("POLICY_READ_ONLY", "this gateway's policy does not come from a file")
        generation, policy = await self._parts.reloader.replace(text.encode(), expected_sha256, origin)
        unchanged = generation is None
        if generation is None:
            generation = self._parts.in_force.generation
        else:
            audit("apply_policy", policy.path, operator(context), generation=generation, sha256=policy.sha256, origin=origin)
        findings = [finding(warning, error=False) for warning in policy.warnings]
        return pb.ApplyPolicyResponse(generation=generation, sha256=policy.sha256, findings=findings, unchanged=unchanged)
