"""Admin's handlers for a policy that is tried on live traffic beside the one in force."""

from __future__ import annotations

import asyncio
import time

from fairlane.errors import ConfigError, FairlaneError
from fairlane.gateway.admin_parts import AdminParts, Context, finding, operator, timestamp
from fairlane.gateway.overrides import audit
from fairlane.gateway.reload import policy_invalid
from fairlane.gateway.shadow_link import ShadowFailed, ShadowLink, Trial
from fairlane.gateway.worker_client import no_ready_worker
from fairlane.protos.fairlane.v1 import admin_pb2 as pb
from fairlane.protos.fairlane.v1 import admin_pb2_grpc


class ShadowHandlers(admin_pb2_grpc.AdminServicer):
    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts

    async def ShadowPolicy(self, request: pb.ShadowPolicyRequest, context: Context) -> pb.ShadowPolicyResponse:
        from fairlane.gateway.policy.loader import load_policy_text  # pulls in the YAML loader, needed here only

        name, worker = request.name or "policy", self._parts.worker
        try:
            policy = await asyncio.to_thread(load_policy_text, request.text.encode(), name)
        except ConfigError as error:
            raise policy_invalid(error) from None
        if not worker.ready:
            raise no_ready_worker()
        try:
            await worker.shadow.start(Trial(name, policy.snapshot(0), time.time()))
        except ShadowFailed as error:
            raise FairlaneError("POLICY_REFUSED", f"the worker does not try it: {error}") from None
        audit("shadow_policy", name, operator(context), sha256=policy.sha256)
        return pb.ShadowPolicyResponse(
            sha256=policy.sha256,
            generation=self._parts.in_force.generation,
            findings=[finding(text, error=False) for text in policy.warnings],
        )

    async def GetShadow(self, request: pb.GetShadowRequest, context: Context) -> pb.ShadowStatus:
        await self._parts.worker.fresh_pong()
        return shadow_status(self._parts.worker.shadow)

    async def StopShadow(self, request: pb.StopShadowRequest, context: Context) -> pb.ShadowStatus:
        shadow = self._parts.worker.shadow
        await self._parts.worker.fresh_pong()
        last = shadow_status(shadow)
        try:
            await shadow.stop()
        except ShadowFailed as error:
            raise FairlaneError("POLICY_REFUSED", f"the worker goes on trying it: {error}") from None
        audit("stop_shadow", last.name, operator(context), sha256=last.sha256)
        last.running = False
        return last


def shadow_status(shadow: ShadowLink) -> pb.ShadowStatus:
    status = pb.ShadowStatus(running=shadow.running, dropped=shadow.dropped)
    if shadow.trial is not None:
        status.name, status.sha256 = shadow.trial.name, shadow.trial.snapshot.sha256
        status.since.CopyFrom(timestamp(shadow.trial.since_s))
    if shadow.report is not None and (shadow.trial is not None or shadow.running):
        status.sha256 = shadow.report.sha256
        status.report.CopyFrom(shadow.report)
    return status
