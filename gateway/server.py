"""The gateway process's servers and their life: start, readiness, a new policy, drain, stop. It wires the parts together;
each part's decisions are its own."""

from __future__ import annotations

import asyncio
import logging
import secrets
from pathlib import Path

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from fairlane.clock import Clock
from fairlane.errors import ConfigError, FairlaneError
from fairlane.gateway.admin import AdminService
from fairlane.gateway.admin_parts import AdminParts
from fairlane.gateway.admission import Admission, retry_after_s
from fairlane.gateway.auth import AdminAuthenticator, Authenticator, PolicyAuthenticator
from fairlane.gateway.config import GatewayConfig
from fairlane.gateway.explainer import Explainer
from fairlane.gateway.health import MAX_WATCHERS, SERVICE_NAME, HealthService
from fairlane.gateway.history import PolicyHistory
from fairlane.gateway.interceptors import Edge, EdgeInterceptor
from fairlane.gateway.metrics import GatewayMetrics
from fairlane.gateway.metrics_server import MetricsServer
from fairlane.gateway.metrics_shadow import ShadowCollector
from fairlane.gateway.metrics_worker import WorkerCollector
from fairlane.gateway.overrides import Overrides
from fairlane.gateway.policy.model import Policy
from fairlane.gateway.policy_in_force import PolicyInForce
from fairlane.gateway.policy_source import PolicySource
from fairlane.gateway.refusal_log import RefusalLog
from fairlane.gateway.reload import PolicyReloader
from fairlane.gateway.rpc_slots import RpcSlots
from fairlane.gateway.service import InferenceService
from fairlane.gateway.tokenizer import load_encoder
from fairlane.gateway.tokenizer_pool import TokenizerPool
from fairlane.gateway.trace.recorder import open_recorder
from fairlane.gateway.worker_client import WorkerClient
from fairlane.protos.fairlane.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

logger = logging.getLogger("fairlane.gateway")

_INFERENCE: ServiceDescriptor = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
_ADMIN: ServiceDescriptor = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
_HEALTH: ServiceDescriptor = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION: ServiceDescriptor = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
INFERENCE: str = _INFERENCE.full_name
# After a drain, time for statuses already decided to reach their clients.
_CLOSE_GRACE_S = 1.0
# How often clients may ping; docs/api.md says so.
MIN_PING_INTERVAL_MS = 5_000
_ADMIN_RPCS = 16
_REFLECTION_RPCS = 64
# Calls that are being refused, or whose message has not come in yet. The transport's own refusal has no details and does not
# know callers apart, so it is for floods only.
_UNSERVED_RPCS = 4096


class Gateway:
    """One gateway. Start it once, in the event loop that will run it; `drain_and_stop` ends it for good.

    model_dir: the Hugging Face folder with the tokenizer; None serves token ids only.
    """

    def __init__(
        self,
        config: GatewayConfig,
        policy: Policy,
        pepper: bytes,
        admin_key_hash: str,
        worker_address: str,
        model_dir: Path | None,
        clock: Clock,
        *,
        source: PolicySource | None = None,
        state_dir: Path | None = None,
    ) -> None:
        self._config = config
        history = PolicyHistory(state_dir)
        generation = history.last_generation() + 1
        self._overrides = Overrides(state_dir)
        encoder = None if model_dir is None else load_encoder(model_dir)
        self._tokenizers = TokenizerPool(encoder, config.tokenizer_threads)
        self._authenticator = PolicyAuthenticator(policy, generation, pepper, self._overrides)
        self._admission = Admission(clock)
        self._health = HealthService(("", INFERENCE), MAX_WATCHERS)
        self._worker = WorkerClient(
            worker_address,
            gateway_id=secrets.token_hex(8),
            timeout_s=config.worker_timeout,
            ping_interval_s=config.ping_interval,
            clock=clock,
            on_ready=self._health.set_serving,
        )
        in_force = PolicyInForce(policy, generation, self._worker, self._authenticator, self._admission, history)
        self._in_force = in_force
        self._metrics = GatewayMetrics(clock, config.metrics_tenants)
        self._reloader: PolicyReloader | None = None
        if source is not None:
            failed = self._metrics.policy_reload_failed
            self._reloader = PolicyReloader(source, lambda: in_force.policy, in_force.apply, on_failure=failed)
        collector = WorkerCollector(self._worker, lambda: (in_force.policy, in_force.generation), config.metrics_tenants)
        self._metrics.registry.register(collector)
        self._metrics.registry.register(ShadowCollector(self._worker.shadow))
        self._metrics_server = MetricsServer(self._metrics.registry, self._metrics.sweep)
        self._trace = None
        if config.trace:
            if state_dir is None:
                raise ConfigError(["trace: true needs a state folder to record in"])
            self._trace = open_recorder(state_dir, config.trace_size, clock, self._metrics.trace_dropped.inc)
        explainer = Explainer(self._worker)
        self._service = InferenceService(
            config, self._overrides, self._admission, self._worker, self._tokenizers, self._metrics, clock, explainer, self._trace
        )
        self._refusals = RefusalLog(clock)
        self._server = self._public_server()
        parts = AdminParts(
            self._admission, self._worker, in_force, self._overrides, history, self._reloader, explainer, self.drain
        )
        self._admin_server = self._make_admin_server(AdminAuthenticator(admin_key_hash, pepper), AdminService(parts))
        self._stopped = False
        self.port = 0
        self.admin_port = 0
        self.metrics_port = 0

    @property
    def worker(self) -> WorkerClient:
        return self._worker

    @property
    def admission(self) -> Admission:
        return self._admission

    async def start(self) -> None:
        """Binds the ports (`port`, `admin_port`, and `metrics_port` if there are metrics, hold them then) and begins to
        connect to the worker. Raises OSError if a port cannot be had; nothing is left running then."""
        try:
            self.port = _bind(self._server, self._config.host, self._config.port)
            self.admin_port = _bind(self._admin_server, self._config.admin_host, _admin_port(self._config, self.port))
            if self._config.metrics:
                self.metrics_port = _serve_metrics(self._metrics_server, self._config, self.admin_port)
            await self._server.start()
            await self._admin_server.start()
        except BaseException:
            await self._stop_servers(0)
            raise
        await self._in_force.start()
        if self._reloader is not None:
            self._reloader.start()
        logger.info("listening on %s:%d, admin on %s:%d", self._config.host, self.port, self._config.admin_host, self.admin_port)

    async def wait_ready(self, timeout: float) -> None:
        """Returns once the worker is connected and has applied the policy. Raises TimeoutError after `timeout` seconds."""
        async with asyncio.timeout(timeout):
            await self._worker.wait_ready()

    @property
    def policy_generation(self) -> int:
        return self._in_force.generation

    async def apply_policy(self, policy: Policy, origin: str = "apply") -> int:
        """Puts a policy in force and returns its generation; the policy file stays as it is. Raises PolicyRefused, and the old
        one stays."""
        return await self._in_force.apply(policy, origin)

    def reload_policy(self) -> None:
        """Looks at the policy file now, also at one that could not be used before; what comes of it is in the log."""
        if self._reloader is not None:
            self._reloader.nudge()

    def drain(self) -> None:
        """Health turns NOT_SERVING, then new requests are refused; those in flight go on."""
        self._health.shut_down()
        self._admission.draining = True

    async def drain_and_stop(self, grace: float) -> None:
        """Drains, gives requests in flight `grace` seconds, ends the rest with DRAINING and closes everything."""
        if self._stopped:
            return
        self._stopped = True
        self.drain()
        try:
            async with asyncio.timeout(grace):
                await self._admission.wait_idle()
        except TimeoutError:
            logger.warning("drain: %d requests cut after %g s", self._admission.in_flight(), grace)
            self._admission.cancel_all(FairlaneError("DRAINING", "this gateway is shutting down", retry_after_s=retry_after_s()))
        finally:
            if self._reloader is not None:
                await self._reloader.close()
            await self._stop_servers(_CLOSE_GRACE_S)
            await self._worker.close()
            self._tokenizers.close()
            if self._trace is not None:
                await asyncio.to_thread(self._trace.close)

    async def _stop_servers(self, grace: float) -> None:
        await asyncio.gather(self._server.stop(grace), self._admin_server.stop(grace))
        await self._metrics_server.stop()

    def _public_server(self) -> grpc.aio.Server:
        edges = [
            Edge(_INFERENCE, self._authenticator, RpcSlots(self._config.max_concurrent_rpcs, "calls")),
            Edge(_HEALTH, None, None),  # it bounds its watchers itself, and probes must always get through
            Edge(_REFLECTION, None, RpcSlots(_REFLECTION_RPCS, "reflection streams")),
        ]
        interceptor = EdgeInterceptor(edges, self._refusals, self._metrics.turned_away)
        server = self._new_server(interceptor, self._config.max_concurrent_rpcs + MAX_WATCHERS + _REFLECTION_RPCS)
        inference_pb2_grpc.add_InferenceServicer_to_server(self._service, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._config.reflection:
            reflection.enable_server_reflection((INFERENCE, SERVICE_NAME, reflection.SERVICE_NAME), server)
        return server

    def _make_admin_server(self, authenticator: Authenticator, service: AdminService) -> grpc.aio.Server:
        interceptor = EdgeInterceptor([Edge(_ADMIN, authenticator, RpcSlots(_ADMIN_RPCS, "admin calls"))], self._refusals)
        server = self._new_server(interceptor, _ADMIN_RPCS)
        admin_pb2_grpc.add_AdminServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        return server

    def _new_server(self, interceptor: EdgeInterceptor, served: int) -> grpc.aio.Server:
        """served: calls that EdgeInterceptor lets in at most."""
        return grpc.aio.server(
            interceptors=[interceptor],
            options=server_options(self._config),
            maximum_concurrent_rpcs=served + _UNSERVED_RPCS,
        )


def server_options(config: GatewayConfig) -> list[tuple[str, int]]:
    """grpc options of both servers. Clients may ping every 5 s, also without a call: a patient client on a silent stream is
    waiting in our queue, not flooding us."""
    return [
        ("grpc.so_reuseport", 0),  # two gateways on one port must fail, not share it silently
        ("grpc.max_receive_message_length", config.max_message),
        ("grpc.max_metadata_size", config.max_metadata),
        ("grpc.absolute_max_metadata_size", config.max_metadata),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 20_000),
    ]


def _admin_port(config: GatewayConfig, public_port: int) -> int:
    """None in the file means the port after the public one; with any free public port, any free one."""
    if config.admin_port is not None:
        return config.admin_port
    return 0 if config.port == 0 else public_port + 1


def _serve_metrics(server: MetricsServer, config: GatewayConfig, admin_port: int) -> int:
    """Starts it and returns its port, which like the admin port's is the next one unless the file says otherwise."""
    port = config.metrics_port
    if port is None:
        port = 0 if 0 in (config.port, config.admin_port) else admin_port + 1
    try:
        return server.start(config.metrics_host, port)
    except (OSError, OverflowError) as error:
        raise OSError(f"cannot listen on {config.metrics_host}:{port} for metrics: {error}") from error


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    try:
        bound: int = server.add_insecure_port(f"{_bracketed(host)}:{port}")
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    if not bound:
        raise OSError(f"cannot listen on {host}:{port}")
    return bound


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
