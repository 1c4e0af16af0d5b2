"""The outermost layer of every RPC: decodes the message, authenticates the caller and turns every outcome that is not an
answer into a gRPC status. Nothing an exception says reaches a client unless it is a FairlaneError; what requests mean is
left to the services."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
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

logger = logging.getLogger("fairlane.gateway")

DOMAIN = "fairlane"
# Trailers must fit a stock client's 8 KiB metadata limit, base64 included.
_MAX_MESSAGE = 600
_MAX_VIOLATION = 300
_MAX_DETAIL_BYTES = 3072

_caller: ContextVar[Identity] = ContextVar("fairlane_caller")

Method = Callable[[Any, Any], Any]


def current_identity() -> Identity:
    """Who is calling, inside a handler behind `EdgeInterceptor`."""
    return _caller.get()


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


class EdgeInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps every method of `service`; other services pass through untouched.

    Authentication comes before decoding, so that strangers cannot make us parse.
    """

    def __init__(self, service: ServiceDescriptor, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._requests: dict[str, type[Message]] = {
            f"/{service.full_name}/{method.name}": GetMessageClass(method.input_type) for method in service.methods
        }

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        request_type = self._requests.get(method)
        if handler is None or request_type is None:
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._guard(method, request_type, handler.unary_stream),
                request_deserializer=None,
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._guard(method, request_type, handler.unary_unary),
            request_deserializer=None,
            response_serializer=handler.response_serializer,
        )

    def _guard(self, method: str, request_type: type[Message], inner: Method) -> Method:
        async def guarded(body: bytes, context: grpc.aio.ServicerContext) -> Any:
            try:
                _caller.set(self._authenticator.authenticate(context.invocation_metadata() or (), context.peer()))
                return await inner(_decode(request_type, body), context)
            except FairlaneError as error:
                refusal = error
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - the last line of defence; CancelledError passes
                refusal = _incident(method, error)
            logger.info("%s: %s %s", method, refusal.code.value, refusal.reason)
            return await _abort(context, refusal)

        return guarded


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
