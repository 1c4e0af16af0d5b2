"""grpc.health.v1 for both probes and watching clients. It only repeats what it is told; who is ready is the server's to know.

grpcio-health-checking's own asyncio servicer forgets every other watcher of a service when one of them leaves, so that clients
which balance by health would not hear of a drain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fairlane.gateway.rpc_slots import RpcSlots

SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

Context: TypeAlias = grpc.aio.ServicerContext
Status: TypeAlias = health_pb2.HealthCheckResponse.ServingStatus

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

# Watching needs no key and lasts for ever, so it is counted apart from everything else.
MAX_WATCHERS = 1000


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """One status for all `services`, NOT_SERVING at first. Runs behind EdgeInterceptor."""

    def __init__(self, services: Iterable[str], max_watchers: int = MAX_WATCHERS) -> None:
        self._watchers = RpcSlots(max_watchers, "health watchers")
        self._services = frozenset(services)
        self._status: Status = NOT_SERVING
        self._changed = asyncio.Event()
        self._shutting_down = False

    def set_serving(self, serving: bool) -> None:
        """Tells every watcher. Does nothing once a shutdown has begun."""
        if not self._shutting_down:
            self._set(SERVING if serving else NOT_SERVING)

    def shut_down(self) -> None:
        """NOT_SERVING from now on, whatever is set."""
        self._shutting_down = True
        self._set(NOT_SERVING)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=self._status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        with self._watchers.hold():
            await self._tell(request, context)

    async def _tell(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Every status there is from now on, each once."""
        sent: Status | None = None
        while True:
            changed = self._changed
            status = self._status if request.service in self._services else SERVICE_UNKNOWN
            if status != sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                sent = status
            await changed.wait()

    def _set(self, status: Status) -> None:
        self._status = status
        self._changed.set()
        self._changed = asyncio.Event()
