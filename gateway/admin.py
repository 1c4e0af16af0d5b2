"""The operations service, on its own port behind its own key. Here: status and draining; the handlers for the policy, for
one that is tried, and for overrides are in admin_policy.py, admin_shadow.py and admin_overrides.py."""

from __future__ import annotations

from collections.abc import Mapping

from fairlane.gateway.admin_overrides import OverrideHandlers, override_message
from fairlane.gateway.admin_parts import AdminParts, Context, operator, timestamp
from fairlane.gateway.admin_policy import PolicyHandlers
from fairlane.gateway.admin_shadow import ShadowHandlers, shadow_status
from fairlane.gateway.overrides import audit
from fairlane.protos.fairlane.v1 import admin_pb2 as pb


class AdminService(PolicyHandlers, ShadowHandlers, OverrideHandlers):
    """Handlers run behind EdgeInterceptor with the admin key."""

    def __init__(self, parts: AdminParts) -> None:
        PolicyHandlers.__init__(self, parts)
        ShadowHandlers.__init__(self, parts)
        OverrideHandlers.__init__(self, parts)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        admission, worker = self._parts.admission, self._parts.worker
        return pb.GetStatusResponse(
            model="" if worker.facts is None else worker.facts.model,
            draining=admission.draining,
            in_flight=admission.in_flight(),
            nodes=_counts(admission.in_flight_by_node(), admission.waiting_by_node()),
            tiers=_counts(admission.in_flight_by_tier(), admission.waiting_by_tier()),
            worker=await self._worker_status(),
            policy=self._policy_status(),
            overrides=[override_message(entry) for entry in self._parts.overrides.active()],
            shadow=shadow_status(worker.shadow),
        )

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        audit("drain", "gateway", operator(context))
        self._parts.drain()
        return pb.DrainResponse()

    def _policy_status(self) -> pb.PolicyStatus:
        in_force, reloader = self._parts.in_force, self._parts.reloader
        status = pb.PolicyStatus(
            generation=in_force.generation,
            sha256=in_force.policy.sha256,
            path=in_force.policy.path,
            applied_at=timestamp(in_force.applied_s),
            warnings=in_force.policy.warnings,
        )
        if reloader is not None:
            status.error.extend(reloader.error)
            status.load_failures, status.reloads = reloader.counters.failures, reloader.counters.reloads
        return status

    async def _worker_status(self) -> pb.WorkerStatus:
        facts = self._parts.worker.facts
        if facts is None:
            return pb.WorkerStatus()
        if not self._parts.worker.connected:
            return pb.WorkerStatus(epoch=facts.epoch)  # what it was says nothing about now
        pong = await self._parts.worker.fresh_pong()
        return pb.WorkerStatus(
            ready=self._parts.worker.ready,
            epoch=facts.epoch,
            step_id=pong.step_id,
            running=pong.running,
            waiting=pong.waiting,
            blocks_total=facts.num_blocks,
            blocks_used=pong.blocks_used,
            blocks_cached=pong.blocks_cached,
            block_utilization_ratio=pong.block_utilization_ratio,
            fragmentation_rate=pong.fragmentation_rate,
            preemptions=pong.preemptions,
            policy_generation=pong.policy_generation,
            pid=facts.pid,
            swaps_out=pong.swaps_out,
            swaps_in=pong.swaps_in,
            host_blocks_used=pong.host_blocks_used,
            host_blocks_total=facts.num_host_blocks,
        )


def _counts(in_flight: Mapping[str, int], waiting: Mapping[str, int]) -> list[pb.NodeStatus]:
    return [pb.NodeStatus(node=name, in_flight=count, waiting=waiting.get(name, 0)) for name, count in in_flight.items()]
