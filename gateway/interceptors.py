"""The outermost layer of every RPC: authenticates the caller, counts the call, decodes the message and turns every outcome
that is not an answer into a gRPC status. Nothing an exception says reaches a client unless it is a FairlaneError; what
requests mean is left to the services."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, aclosing, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import code_pb2, error_details_pb2, status_pb2

from fairlane.errors import Code, FairlaneError
from fairlane.gateway.auth import Authenticator, Identity
from fairlane.gateway.refusal_log import RefusalLog
from fairlane.gateway.rpc_slots import RpcSlots

logger = logging.getLogger("fairlane.gateway")

DOMAIN = "fairlane"
# Trailers must fit a stock client's 8 KiB metadata limit, base64 included.
_MAX_MESSAGE = 600
_MAX_VIOLATION = 300
_MAX_DETAIL_BYTES = 3072

_caller: ContextVar[Identity | None] = ContextVar("fairlane_caller")
_request_id: ContextVar[str] = ContextVar("fairlane_request_id")

Method = Callable[[Any, Any], Any]


def current_identity() -> Identity:
    """Who is calling, inside a handler that wants a key."""
    identity = _caller.get()
    if identity is None:
        raise LookupError("this service does not ask who is calling")
    return identity


def name_request(request_id: str) -> None:
    """The id under which the log knows the call in progress, should it be refused."""
    _request_id.set(request_id)


def error_status(error: FairlaneError) -> status_pb2.Status:
    """The google.rpc.Status of an error: ErrorInfo always, BadRequest and RetryInfo where they apply."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code.value), message=_clip(error.message, _MAX_MESSAGE))
    metadata = {key: _clip(value, _MAX_VIOLATION) for key, value in error.metadata.items()}
    _pack(status, error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad.field_violations.add(field=violation.field, description=_clip(violation.description, _MAX_VIOLATION))
            if bad.ByteSize() > _MAX_DETAIL_BYTES:
                break
        _pack(status, bad)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(_milliseconds(error.retry_after_s))
        _pack(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def trailers(error: FairlaneError) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata of an error: its details, and the delay that stock gRPC retry policies obey."""
    details = ("grpc-status-details-bin", error_status(error).SerializeToString())
    if error.retry_after_s is None:
        return (details,)
    return (details, ("grpc-retry-pushback-ms", str(_milliseconds(error.retry_after_s))))


def _pack(status: status_pb2.Status, detail: Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


@dataclass(frozen=True, slots=True)
class Edge:
    """How every method of one service is guarded. authenticator None: strangers may call. slots None: not counted."""

    service: ServiceDescriptor
    authenticator: Authenticator | None
    slots: RpcSlots | None


@dataclass(slots=True)
class _Progress:
    """How far a call has come: `asked` once the service itself was."""

    asked: bool = False


class EdgeInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps every method of the services it is given; a service it does not know stays raw, so there must be none.

    Authentication comes before counting, so that strangers cannot use up the tenants' slots, and before decoding, so that they
    cannot make us parse.
    """

    def __init__(
        self, edges: Iterable[Edge], log: RefusalLog, on_turned_away: Callable[[str], None] = lambda reason: None
    ) -> None:
        """on_turned_away: told the reason of a refusal that came before the service was asked."""
        self._log = log
        self._on_turned_away = on_turned_away
        self._methods: dict[str, tuple[Edge, type[Message]]] = {
            f"/{edge.service.full_name}/{method.name}": (edge, GetMessageClass(method.input_type))
            for edge in edges
            for method in edge.service.methods
        }

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or method not in self._methods:
            return handler
        make, guarded = self._guarded(handler, method)
        return make(guarded, request_deserializer=None, response_serializer=handler.response_serializer)

    def _guarded(self, handler: grpc.RpcMethodHandler, method: str) -> tuple[Callable[..., grpc.RpcMethodHandler], Method]:
        if handler.request_streaming and handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler, self._guard_streams(method, handler.stream_stream)
        if handler.request_streaming:
            raise NotImplementedError(f"{method}: no service of ours takes a stream and answers once")
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler, self._guard(method, handler.unary_stream)
        return grpc.unary_unary_rpc_method_handler, self._guard(method, handler.unary_unary)

    def _guard(self, method: str, inner: Method) -> Method:
        _, request_type = self._methods[method]

        async def guarded(body: bytes, context: grpc.aio.ServicerContext) -> Any:
            async def work(progress: _Progress) -> Any:
                request = _decode(request_type, body)
                name_request(getattr(request, "request_id", ""))
                progress.asked = True
                return await inner(request, context)

            return await self._answer(method, context, work)

        return guarded

    def _guard_streams(self, method: str, inner: Method) -> Method:
        """`inner` is an async generator over decoded requests."""
        _, request_type = self._methods[method]

        async def decoded(bodies: AsyncIterator[bytes]) -> AsyncIterator[Message]:
            async for body in bodies:
                yield _decode(request_type, body)

        async def guarded(bodies: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            async def work(progress: _Progress) -> None:
                progress.asked = True
                async with aclosing(inner(decoded(bodies), context)) as responses:
                    async for response in responses:
                        await context.write(response)

            await self._answer(method, context, work)

        return guarded

    async def _answer(self, method: str, context: grpc.aio.ServicerContext, work: Callable[[_Progress], Awaitable[Any]]) -> Any:
        """Lets the caller in and does the work; every failure becomes a status."""
        edge, progress = self._methods[method][0], _Progress()
        _caller.set(None)
        name_request("")
        try:
            if edge.authenticator is not None:
                _caller.set(edge.authenticator.authenticate(context.invocation_metadata() or (), context.peer()))
            with _slot(edge):
                return await work(progress)
        except FairlaneError as error:
            refusal = error
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the last line of defence; CancelledError passes
            refusal = _incident(method, error)
        self._log.refused(method, refusal, _caller.get(), _request_id.get(), context.peer())
        if not progress.asked and edge.authenticator is not None:
            self._on_turned_away(refusal.reason)
        return await _abort(context, refusal)


def _slot(edge: Edge) -> AbstractContextManager[None]:
    return nullcontext() if edge.slots is None else edge.slots.hold()


def _decode(request_type: type[Message], body: bytes) -> Message:
    try:
        return request_type.FromString(body)
    except DecodeError:  # also invalid UTF-8 in a string field; the parser's own words may quote the input
        raise FairlaneError("MALFORMED_REQUEST", f"the bytes are not a {request_type.DESCRIPTOR.full_name}") from None


def _incident(method: str, error: Exception) -> FairlaneError:
    """Hides an unexpected exception behind a random id under which the log has it."""
    incident = secrets.token_hex(8)
    logger.error("incident %s in %s", incident, method, exc_info=error)
    return FairlaneError("INTERNAL", f"internal error, incident {incident}", metadata={"incident": incident})


# A reader that stopped reading never takes its status either; the call is dropped instead of waiting for it for ever.
_ABORT_TIMEOUT_S = 5.0

_GRPC_CODES = {code: grpc.StatusCode[code.value] for code in Code}


async def _abort(context: grpc.aio.ServicerContext, error: FairlaneError) -> None:
    async with asyncio.timeout(_ABORT_TIMEOUT_S):
        await context.abort(_GRPC_CODES[error.code], _clip(error.message, _MAX_MESSAGE), trailers(error))
