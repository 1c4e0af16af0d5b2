"""The gateway process's servers and their life: start, readiness, a new policy, drain, stop. It wires the parts together;
each part's decisions are its own."""

from __future__ import annotations

import asyncio
import logging
import secrets
from pathlib import Path

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fairlane.clock import Clock
from fairlane.errors import FairlaneError
from fairlane.gateway.admin import AdminService
from fairlane.gateway.admission import Admission, retry_after_s
from fairlane.gateway.auth import AdminAuthenticator, Authenticator, PolicyAuthenticator
from fairlane.gateway.config import GatewayConfig
from fairlane.gateway.health import SERVICE_NAME, HealthService
from fairlane.gateway.interceptors import EdgeInterceptor
from fairlane.gateway.policy.model import Policy
from fairlane.gateway.service import InferenceService
from fairlane.gateway.tokenizer import load_encoder
from fairlane.gateway.tokenizer_pool import TokenizerPool
from fairlane.gateway.worker_client import WorkerClient
from fairlane.protos.fairlane.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

logger = logging.getLogger("fairlane.gateway")

_INFERENCE: ServiceDescriptor = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
_ADMIN: ServiceDescriptor = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
INFERENCE: str = _INFERENCE.full_name
# After a drain, time for statuses already decided to reach their clients.
_CLOSE_GRACE_S = 1.0
_ADMIN_RPCS = 16


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
    ) -> None:
        self._config = config
        self._policy = policy
        self._generation = 1
        self._applying = asyncio.Lock()
        encoder = None if model_dir is None else load_encoder(model_dir)
        self._tokenizers = TokenizerPool(encoder, config.tokenizer_threads)
        self._authenticator = PolicyAuthenticator(policy, pepper)
        self._admission = Admission(policy.nodes)
        self._health = HealthService(("", INFERENCE))
        self._worker = WorkerClient(
            worker_address,
            gateway_id=secrets.token_hex(8),
            timeout_s=config.worker_timeout,
            ping_interval_s=config.ping_interval,
            clock=clock,
            on_ready=self._health.set_serving,
        )
        self._service = InferenceService(config, policy, self._admission, self._worker, self._tokenizers, clock)
        self._server = self._public_server()
        self._admin_server = self._make_admin_server(AdminAuthenticator(admin_key_hash, pepper))
        self._stopped = False
        self.port = 0
        self.admin_port = 0

    @property
    def worker(self) -> WorkerClient:
        return self._worker

    @property
    def admission(self) -> Admission:
        return self._admission

    async def start(self) -> None:
        """Binds both ports (`port` and `admin_port` hold them then) and begins to connect to the worker. Raises OSError if a
        port cannot be had; nothing is left running then."""
        try:
            self.port = _bind(self._server, self._config.host, self._config.port)
            self.admin_port = _bind(self._admin_server, self._config.admin_host, _admin_port(self._config, self.port))
            await self._server.start()
            await self._admin_server.start()
        except BaseException:
            await self._stop_servers(0)
            raise
        self._worker.start(self._policy.snapshot(self._generation))
        logger.info("listening on %s:%d, admin on %s:%d", self._config.host, self.port, self._config.admin_host, self.admin_port)

    async def wait_ready(self, timeout: float) -> None:
        """Returns once the worker is connected and has applied the policy. Raises TimeoutError after `timeout` seconds."""
        async with asyncio.timeout(timeout):
            await self._worker.wait_ready()

    async def apply_policy(self, policy: Policy) -> int:
        """Puts a policy in force and returns its generation: the worker first, so that no request names a tier it does not
        know. Raises PolicyRefused, and everything stays as it was."""
        async with self._applying:
            generation = self._generation + 1
            await self._worker.apply_policy(policy.snapshot(generation))
            self._policy, self._generation = policy, generation
            self._authenticator.replace(policy)
            self._admission.replace(policy.nodes)
            self._service.policy = policy
            logger.info("policy generation %d in force, sha256 %s", generation, policy.sha256)
            return generation

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
            await self._stop_servers(_CLOSE_GRACE_S)
            await self._worker.close()
            self._tokenizers.close()

    async def _stop_servers(self, grace: float) -> None:
        await asyncio.gather(self._server.stop(grace), self._admin_server.stop(grace))

    def _public_server(self) -> grpc.aio.Server:
        server = self._new_server(_INFERENCE, self._authenticator, self._config.max_concurrent_rpcs)
        inference_pb2_grpc.add_InferenceServicer_to_server(self._service, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._config.reflection:
            reflection.enable_server_reflection((INFERENCE, SERVICE_NAME, reflection.SERVICE_NAME), server)
        return server

    def _make_admin_server(self, authenticator: Authenticator) -> grpc.aio.Server:
        server = self._new_server(_ADMIN, authenticator, _ADMIN_RPCS)
        service = AdminService(self._admission, self._worker, lambda: (self._policy, self._generation), self.drain)
        admin_pb2_grpc.add_AdminServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        return server

    def _new_server(self, service: ServiceDescriptor, authenticator: Authenticator, max_rpcs: int) -> grpc.aio.Server:
        return grpc.aio.server(
            interceptors=[EdgeInterceptor(service, authenticator)],
            options=server_options(self._config),
            maximum_concurrent_rpcs=max_rpcs,
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
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
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
