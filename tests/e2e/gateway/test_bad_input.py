"""What clients get wrong, over a real connection: every row names the code, the reason and all the fields at fault, and the
worker never hears of any of it."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import pytest

from fairlane.gateway.config import GatewayConfig
from fairlane.gateway.service import allowed_seconds
from fairlane.protos.fairlane.v1 import inference_pb2 as pb

pytestmark = pytest.mark.asyncio

Code = grpc.StatusCode
MAX_PROMPT = 2000


@pytest.fixture
def gateway_config() -> GatewayConfig:
    return GatewayConfig(port=0, coalesce=0.0, max_prompt=MAX_PROMPT)


def sampling(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(**fields))


def stopping(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="x", stopping=pb.StoppingParams(**fields))


def chat(*messages: tuple[str, str]) -> pb.GenerateRequest:
    return pb.GenerateRequest(messages=pb.Messages(messages=[pb.Message(role=r, content=c) for r, c in messages]))


def ids(*values: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=values))


UNKNOWN_MODE = pb.CacheOptions()
UNKNOWN_MODE.MergeFromString(b"\x08\x4d")  # field 1, varint 77: a mode of some later version

INVALID: dict[str, tuple[pb.GenerateRequest, str, set[str]]] = {
    "no input": (pb.GenerateRequest(), "INVALID_REQUEST", {"input"}),
    "empty prompt": (pb.GenerateRequest(prompt=""), "INVALID_REQUEST", {"prompt"}),
    "no messages": (chat(), "INVALID_REQUEST", {"messages"}),
    "no token ids": (ids(), "INVALID_REQUEST", {"token_ids"}),
    "unknown role": (chat(("user", "a"), ("root", "b")), "INVALID_REQUEST", {"messages[1].role"}),
    "too many messages": (chat(*[("user", "a")] * 8193), "INVALID_REQUEST", {"messages"}),
    "prompt too large": (pb.GenerateRequest(prompt="€" * 667), "PROMPT_TOO_LARGE", {"prompt"}),
    "messages too large": (chat(("user", "a" * 1500), ("user", "b" * 501)), "PROMPT_TOO_LARGE", {"messages"}),
    "unknown tier": (pb.GenerateRequest(prompt="x", tier="platinum"), "TIER_UNKNOWN", {"tier"}),
    "unknown cache mode": (pb.GenerateRequest(prompt="x", cache=UNKNOWN_MODE), "INVALID_REQUEST", {"cache.mode"}),
    "temperature NaN": (sampling(temperature=math.nan), "INVALID_REQUEST", {"sampling.temperature"}),
    "temperature Inf": (sampling(temperature=math.inf), "INVALID_REQUEST", {"sampling.temperature"}),
    "temperature -Inf": (sampling(temperature=-math.inf), "INVALID_REQUEST", {"sampling.temperature"}),
    "temperature -1": (sampling(temperature=-1), "INVALID_REQUEST", {"sampling.temperature"}),
    "temperature 1e9": (sampling(temperature=1e9), "INVALID_REQUEST", {"sampling.temperature"}),
    "temperature above 2": (sampling(temperature=2.0000002), "INVALID_REQUEST", {"sampling.temperature"}),
    "top_p 0": (sampling(top_p=0), "INVALID_REQUEST", {"sampling.top_p"}),
    "top_p below float32": (sampling(top_p=1e-50), "INVALID_REQUEST", {"sampling.top_p"}),
    "top_p 1.1": (sampling(top_p=1.1), "INVALID_REQUEST", {"sampling.top_p"}),
    "top_p NaN": (sampling(top_p=math.nan), "INVALID_REQUEST", {"sampling.top_p"}),
    "top_k -2": (sampling(top_k=-2), "INVALID_REQUEST", {"sampling.top_k"}),
    "min_p": (sampling(min_p=1.5), "INVALID_REQUEST", {"sampling.min_p"}),
    "presence": (sampling(presence_penalty=2.5), "INVALID_REQUEST", {"sampling.presence_penalty"}),
    "frequency": (sampling(frequency_penalty=-2.5), "INVALID_REQUEST", {"sampling.frequency_penalty"}),
    "repetition 0": (sampling(repetition_penalty=0), "INVALID_REQUEST", {"sampling.repetition_penalty"}),
    "bias of an unknown token": (sampling(logit_bias={300: 1}), "INVALID_REQUEST", {"sampling.logit_bias[300]"}),
    "bias NaN": (sampling(logit_bias={3: math.nan}), "INVALID_REQUEST", {"sampling.logit_bias[3]"}),
    "bias 101": (sampling(logit_bias={3: 101}), "INVALID_REQUEST", {"sampling.logit_bias[3]"}),
    "too many biases": (sampling(logit_bias=dict.fromkeys(range(129), 1.0)), "INVALID_REQUEST", {"sampling.logit_bias"}),
    "max_tokens 0": (stopping(max_tokens=0), "INVALID_REQUEST", {"stopping.max_tokens"}),
    "max_tokens 2**32-1": (stopping(max_tokens=2**32 - 1), "INVALID_REQUEST", {"stopping.max_tokens"}),
    "max_tokens above the tier": (stopping(max_tokens=201), "INVALID_REQUEST", {"stopping.max_tokens"}),
    "empty stop": (stopping(stop=["a", ""]), "INVALID_REQUEST", {"stopping.stop[1]"}),
    "stop of 66 bytes": (stopping(stop=["€" * 22]), "INVALID_REQUEST", {"stopping.stop[0]"}),
    "five stops": (stopping(stop=list("abcde")), "INVALID_REQUEST", {"stopping.stop"}),
    "500,000 stops": (stopping(stop=["a"] * 500_000), "INVALID_REQUEST", {"stopping.stop"}),
    "unknown stop token": (stopping(stop_token_ids=[1, 300]), "INVALID_REQUEST", {"stopping.stop_token_ids[1]"}),
    "129 stop tokens": (stopping(stop_token_ids=[1] * 129), "INVALID_REQUEST", {"stopping.stop_token_ids"}),
    "prompt token outside the vocabulary": (ids(1, 2, 300, 4), "INVALID_REQUEST", {"token_ids.ids[2]"}),
    "order": (pb.GenerateRequest(prompt="x", order=101), "INVALID_REQUEST", {"order"}),
    "short request_id": (pb.GenerateRequest(prompt="x", request_id="a"), "INVALID_REQUEST", {"request_id"}),
    "1 MiB request_id": (pb.GenerateRequest(prompt="x", request_id="a" * 2**20), "INVALID_REQUEST", {"request_id"}),
    "request_id {}": (pb.GenerateRequest(prompt="x", request_id="abcdefgh{}"), "INVALID_REQUEST", {"request_id"}),
    "request_id newline": (pb.GenerateRequest(prompt="x", request_id="abcdefgh\n"), "INVALID_REQUEST", {"request_id"}),
    "partition": (
        pb.GenerateRequest(prompt="x", cache=pb.CacheOptions(partition="p" * 65)),
        "INVALID_REQUEST",
        {"cache.partition"},
    ),
    "everything at once": (
        pb.GenerateRequest(
            tier="platinum",
            order=-101,
            request_id="!",
            sampling=pb.SamplingParams(temperature=-1, top_p=2, top_k=-9, logit_bias={9999: math.inf}),
            stopping=pb.StoppingParams(max_tokens=0, stop=[""]),
        ),
        "INVALID_REQUEST",
        {
            "input",
            "tier",
            "order",
            "request_id",
            "sampling.temperature",
            "sampling.top_p",
            "sampling.top_k",
            "sampling.logit_bias[9999]",
            "stopping.max_tokens",
            "stopping.stop[0]",
        },
    ),
}


@pytest.mark.parametrize("name", INVALID)
@pytest.mark.parametrize("method", ["generate", "complete"])
async def test_invalid_fields_are_all_named_at_once(service: Any, refused: Any, name: str, method: str) -> None:
    request, reason, fields = INVALID[name]
    refusal = await refused(getattr(service, method)(request))
    assert (refusal.code, refusal.reason, refusal.info.domain) == (Code.INVALID_ARGUMENT, reason, "fairlane")
    assert set(refusal.violations) == fields
    # Trailers-only: no initial metadata of ours, so that stock retry policies may fire.
    assert "fairlane-request-id" not in refusal.initial
    assert service.worker.adds == []


REFUSED: dict[str, tuple[pb.GenerateRequest, Any, str, dict[str, str]]] = {
    "prompt and max_tokens beyond the context": (
        pb.GenerateRequest(prompt="x" * 400, tier="batch", stopping=pb.StoppingParams(max_tokens=113)),
        Code.INVALID_ARGUMENT,
        "CONTEXT_LENGTH_EXCEEDED",
        {"prompt_tokens": "400", "max_tokens": "113", "limit": "512"},
    ),
    "prompt alone fills the context": (
        pb.GenerateRequest(prompt="x" * 512),
        Code.INVALID_ARGUMENT,
        "CONTEXT_LENGTH_EXCEEDED",
        {"prompt_tokens": "512", "max_tokens": "1", "limit": "512"},
    ),
    "too many token ids": (
        ids(*[1] * 600),
        Code.INVALID_ARGUMENT,
        "CONTEXT_LENGTH_EXCEEDED",
        {"prompt_tokens": "600", "max_tokens": "1", "limit": "512"},
    ),
    "fits the context, never the cache": (
        pb.GenerateRequest(prompt="x" * 300, tier="batch", stopping=pb.StoppingParams(max_tokens=85)),
        Code.FAILED_PRECONDITION,
        "KV_CAPACITY_EXCEEDED",
        {"prompt_tokens": "300", "max_tokens": "85", "limit": "384"},
    ),
    "a prompt that never fits the cache": (
        pb.GenerateRequest(prompt="x" * 384),
        Code.FAILED_PRECONDITION,
        "KV_CAPACITY_EXCEEDED",
        {"prompt_tokens": "384", "max_tokens": "1", "limit": "384"},
    ),
    "unknown model": (pb.GenerateRequest(prompt="x", model="gpt-9"), Code.NOT_FOUND, "MODEL_NOT_FOUND", {}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_requests_that_can_never_be_served_are_refused_at_once(service: Any, refused: Any, name: str) -> None:
    request, code, reason, metadata = REFUSED[name]
    refusal = await refused(service.generate(request))
    assert (refusal.code, refusal.reason) == (code, reason)
    assert dict(refusal.info.metadata) == metadata
    assert refusal.retry is None
    assert service.worker.adds == []
    assert service.gateway.admission.in_flight() == 0


async def test_the_largest_request_that_fits_is_accepted(service: Any) -> None:
    request = pb.GenerateRequest(prompt="x" * 300, tier="batch", stopping=pb.StoppingParams(max_tokens=84))
    response = await service.complete(request)
    assert response.text == "Hi."


@pytest.mark.parametrize("temperature", [0.0, 0.1, 0.7, 1.9999999, 2.0])
async def test_float32_neighbours_of_the_bounds_are_accepted(service: Any, temperature: float) -> None:
    response = await service.complete(sampling(temperature=temperature, top_p=0.1, min_p=1.0, repetition_penalty=2.0))
    assert response.text == "Hi."


@pytest.mark.parametrize("temperature", [1e-45, 1e-6, -0.0])
async def test_a_temperature_too_small_to_divide_by_is_greedy(service: Any, temperature: float) -> None:
    await service.complete(sampling(temperature=temperature))
    sent = service.worker.adds[0].sampling.temperature
    assert (sent, math.copysign(1, sent)) == (0.0, 1.0)


async def test_a_tier_of_others_is_permission_denied(service: Any, refused: Any) -> None:
    call = service.generate(pb.GenerateRequest(prompt="x", tier="gold"), metadata=service.auth(service.keys.docs))
    refusal = await refused(call)
    assert (refusal.code, refusal.reason) == (Code.PERMISSION_DENIED, "TIER_NOT_ALLOWED")


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x12\x02\xff\xfe", b"\x12\x7fabc"])
@pytest.mark.parametrize("method", ["Generate", "Complete", "CountTokens", "Cancel"])
async def test_bytes_that_are_no_message_are_malformed(service: Any, refused: Any, body: bytes, method: str) -> None:
    # \x12\x02\xff\xfe: invalid UTF-8 in the string field 2; for Cancel the field is 1.
    path = f"/fairlane.v1.Inference/{method}"
    body = body.replace(b"\x12", b"\x0a") if method == "Cancel" else body
    call = service.channel.unary_stream(path)(body, metadata=service.auth())
    refusal = await refused(call)
    assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "MALFORMED_REQUEST")
    assert "DecodeError" not in refusal.message


async def test_fields_of_a_newer_client_are_ignored(service: Any) -> None:
    body = pb.GenerateRequest(prompt="x").SerializeToString() + b"\xa2\x06\x03new"  # field 100
    call = service.channel.unary_unary("/fairlane.v1.Inference/Complete", response_deserializer=pb.CompleteResponse.FromString)
    response = await call(body, metadata=service.auth())
    assert response.text == "Hi."


def unknown(field: int, text: bytes) -> bytes:
    """A field of wire type 2 that no message of ours has."""
    key = field << 3 | 2
    return bytes([key & 0x7F | 0x80, key >> 7, len(text)]) + text


async def test_a_template_of_the_callers_own_is_no_field_and_changes_nothing(service: Any) -> None:
    """chat_template and chat_template_kwargs, as other servers take them: in the request, the messages and a message."""
    evil = b"{{ cycler.__init__.__globals__.os.popen('id').read() }}"
    message = pb.Message(role="user", content="hello").SerializeToString() + unknown(16, evil)
    messages = b"\x0a" + _length(message) + message + unknown(17, evil) + unknown(18, b'{"enable_thinking": true}')
    body = b"\x1a" + _length(messages) + messages + unknown(19, evil) + unknown(20, b'{"chat_template": "x"}')
    complete = service.channel.unary_unary(
        "/fairlane.v1.Inference/Complete", response_deserializer=pb.CompleteResponse.FromString
    )
    await complete(body, metadata=service.auth())
    await service.complete(chat(("user", "hello")))
    ids = [list(add.prompt_token_ids) for add in service.worker.adds]
    assert pb.GenerateRequest.FromString(body).messages.messages[0].content == "hello"
    assert ids[0] == ids[1]


def _length(part: bytes) -> bytes:
    return bytes([len(part) & 0x7F | 0x80, len(part) >> 7])


async def test_a_message_above_the_limit_is_resource_exhausted(service: Any, refused: Any) -> None:
    refusal = await refused(service.generate(pb.GenerateRequest(prompt="x" * (5 << 20))))
    assert refusal.code == Code.RESOURCE_EXHAUSTED


async def test_metadata_above_the_limit_is_resource_exhausted(service: Any, refused: Any) -> None:
    metadata = [*service.auth(), ("x-large", "y" * (17 << 10))]
    refusal = await refused(service.generate(pb.GenerateRequest(prompt="x"), metadata=metadata))
    assert refusal.code == Code.RESOURCE_EXHAUSTED


async def test_an_unknown_method_is_unimplemented(service: Any, refused: Any) -> None:
    call = service.channel.unary_unary("/fairlane.v1.Inference/Nope")(b"", metadata=service.auth())
    refusal = await refused(call)
    assert refusal.code == Code.UNIMPLEMENTED


async def test_a_past_deadline_is_answered_at_once(service: Any, refused: Any, until: Any) -> None:
    service.worker.on_add = service.worker.silent
    refusal = await refused(service.generate(pb.GenerateRequest(prompt="x"), timeout=0))
    assert refusal.code == Code.DEADLINE_EXCEEDED
    await until(lambda: service.gateway.admission.in_flight() == 0)


def raw_call(path: str, body: bytes, *headers: tuple[str, str]) -> bytes:
    """One unary call as HTTP/2 frames, for what no client library lets one send."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    def literal(name: str, value: str) -> bytes:  # HPACK: never indexed, not compressed; shorter than 127 bytes
        return b"\x10" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()

    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers")]
    fields += [("content-type", "application/grpc"), *headers]
    block = b"".join(literal(*field) for field in fields)
    message = b"\0" + len(body).to_bytes(4, "big") + body
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, block) + frame(0, 1, 1, message)


@pytest.mark.parametrize("timeout", ["0m", "1n", "50m"])
async def test_a_deadline_that_passes_on_the_way_ends_the_call_and_leaves_nothing(service: Any, until: Any, timeout: str) -> None:
    """Sent raw, because a client whose own deadline has passed does not send at all. gRPC rounds deadlines up, so that the
    worker may still be asked; then it is told to stop."""
    service.worker.on_add = service.worker.silent
    reader, writer = await asyncio.open_connection("127.0.0.1", service.gateway.port)
    headers = (("authorization", f"Bearer {service.keys.shop}"), ("grpc-timeout", timeout))
    writer.write(raw_call("/fairlane.v1.Inference/Generate", pb.GenerateRequest(prompt="x").SerializeToString(), *headers))
    received = b""
    async with asyncio.timeout(10):
        while not _ended(received):
            received += await reader.read(65536)
    await until(lambda: service.gateway.admission.in_flight() == 0)
    await until(lambda: service.worker.aborts.qsize() == len(service.worker.adds))
    writer.close()
    service.worker.on_add = service.worker.answer("Hi.")
    assert (await service.complete(pb.GenerateRequest(prompt="y"))).text == "Hi."


def _ended(received: bytes) -> bool:
    """Whether stream 1 is over: a frame of it that is RST_STREAM, or has END_STREAM."""
    while len(received) >= 9:
        length, kind, flags, stream = int.from_bytes(received[:3], "big"), received[3], received[4], received[5:9]
        if stream == b"\0\0\0\1" and (kind == 3 or (kind in (0, 1) and flags & 1)):
            return True
        received = received[9 + length :]
    return False


@pytest.mark.parametrize("left_s", [0.0, -1.0])
async def test_a_deadline_that_passes_before_the_handler_runs_is_refused_before_admission(
    service: Any, refused: Any, monkeypatch: pytest.MonkeyPatch, left_s: float
) -> None:
    """What remains is measured by the handler; the clock may have passed the deadline since the call arrived."""
    measured = []

    def judge(client_s: float | None, *others: Any) -> float:
        measured.append(client_s)
        return allowed_seconds(left_s, *others)

    monkeypatch.setattr("fairlane.gateway.service.allowed_seconds", judge)
    monkeypatch.setattr(service.gateway.admission, "admit", None)  # being asked would be an INTERNAL error
    refusal = await refused(service.complete(pb.GenerateRequest(prompt="x"), timeout=20))
    assert (refusal.code, refusal.reason, service.worker.adds) == (Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", [])
    assert measured[0] > 10


async def test_count_tokens_refuses_what_generate_refuses(service: Any, refused: Any) -> None:
    def count(request: pb.CountTokensRequest) -> Any:
        return service.stub.CountTokens(request, metadata=service.auth())

    nothing = await refused(count(pb.CountTokensRequest()))
    large = await refused(count(pb.CountTokensRequest(prompt="x" * 2001)))
    model = await refused(count(pb.CountTokensRequest(prompt="x", model="gpt-9")))
    assert [r.reason for r in (nothing, large, model)] == ["INVALID_REQUEST", "PROMPT_TOO_LARGE", "MODEL_NOT_FOUND"]
