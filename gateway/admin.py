"""The operations service, on its own port behind its own key: status, the policy in force, checking a policy text, draining.
It only reads and asks; what draining means is the server's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TypeAlias

import grpc.aio

from fairlane.errors import ConfigError
from fairlane.gateway.admission import Admission
from fairlane.gateway.policy.model import Policy
from fairlane.gateway.worker_client import WorkerClient
from fairlane.protos.fairlane.v1 import admin_pb2 as pb
from fairlane.protos.fairlane.v1 import admin_pb2_grpc

Context: TypeAlias = grpc.aio.ServicerContext

# "tenants.yaml:7:5: tiers.gold.weight: what is allowed"
_FINDING = re.compile(r"(?P<location>.+?:\d+:\d+): (?P<message>.*)", re.DOTALL)


class AdminService(admin_pb2_grpc.AdminServicer):
    """Handlers run behind EdgeInterceptor with the admin key.

    drain: begins a drain and returns at once. policy: the one in force and its generation.
    """

    def __init__(
        self,
        admission: Admission,
        worker: WorkerClient,
        policy: Callable[[], tuple[Policy, int]],
        drain: Callable[[], None],
    ) -> None:
        self._admission = admission
        self._worker = worker
        self._policy = policy
        self._drain = drain

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        admission = self._admission
        return pb.GetStatusResponse(
            model="" if self._worker.facts is None else self._worker.facts.model,
            draining=admission.draining,
            in_flight=admission.in_flight(),
            nodes=_counts(admission.in_flight_by_node()),
            tiers=_counts(admission.in_flight_by_tier()),
            worker=await self._worker_status(),
        )

    async def GetPolicy(self, request: pb.GetPolicyRequest, context: Context) -> pb.GetPolicyResponse:
        policy, generation = self._policy()
        return pb.GetPolicyResponse(text=policy.text, sha256=policy.sha256, generation=generation, path=policy.path)

    async def CheckPolicy(self, request: pb.CheckPolicyRequest, context: Context) -> pb.CheckPolicyResponse:
        from fairlane.gateway.policy.loader import load_policy_text  # pulls in the YAML loader, needed here only

        try:
            policy = await asyncio.to_thread(load_policy_text, request.text.encode(), request.name or "policy")
        except ConfigError as error:
            return pb.CheckPolicyResponse(ok=False, findings=[_finding(text, error=True) for text in error.findings])
        return pb.CheckPolicyResponse(ok=True, findings=[_finding(text, error=False) for text in policy.warnings])

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        self._drain()
        return pb.DrainResponse()

    async def _worker_status(self) -> pb.WorkerStatus:
        facts = self._worker.facts
        if facts is None:
            return pb.WorkerStatus()
        pong = await self._worker.fresh_pong()
        return pb.WorkerStatus(
            ready=self._worker.ready,
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
        )


def _counts(counts: dict[str, int]) -> list[pb.NodeStatus]:
    return [pb.NodeStatus(node=name, in_flight=count) for name, count in counts.items()]


def _finding(text: str, *, error: bool) -> pb.PolicyFinding:
    match = _FINDING.fullmatch(text)
    if match is None:
        return pb.PolicyFinding(message=text, error=error)
    return pb.PolicyFinding(location=match["location"], message=match["message"], error=error)
