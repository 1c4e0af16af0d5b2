"""A gateway in a world of its own for tests: a scripted worker on a Unix socket, a tiny tokenizer, a policy built by hand, and a
stock gRPC client of a real gateway on loopback between them."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fairlane.clock import MonotonicClock
from fairlane.gateway.config import GatewayConfig
from fairlane.gateway.keys import hash_key, new_key
from fairlane.gateway.policy.model import MemberTemplate, Node, Policy, Principal, TierPolicy
from fairlane.gateway.policy_source import PolicySource
from fairlane.gateway.server import Gateway
from fairlane.protos.fairlane.v1 import admin_pb2_grpc, inference_pb2_grpc, worker_pb2_grpc
from fairlane.protos.fairlane.v1 import explain_pb2 as epb
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from fairlane.protos.fairlane.v1 import worker_pb2 as wpb
from fairlane.scheduler.tenancy import Tier, TiersPolicy

PEPPER = b"p" * 32
EOS = 256
VOCAB = 300  # 256 bytes, two special tokens, padding as real models have it
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token per byte (ids 0-255 in byte order), <|end|> = 256, <|start|> = 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|start|>", special=True)])
    return tokenizer


def _byte_of(char: str) -> int:
    return decoders_table()[char]


def decoders_table() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte, inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + index): byte for index, byte in enumerate(rest)}


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Implements worker.proto by script: `on_add` is called for each Add; tests send what they like with `send`."""

    def __init__(self, socket: Path) -> None:
        self.address = f"unix:{socket}"
        self.welcome = wpb.Welcome(
            worker_id="fake",
            epoch=1,
            model="tiny",
            vocab_size=VOCAB,
            max_model_len=512,
            block_size=16,
            num_blocks=24,
            num_host_blocks=10,
            eos_token_ids=[EOS],
            pid=1,
        )
        self.adds: list[wpb.Add] = []
        self.aborts: asyncio.Queue[int] = asyncio.Queue()
        self.policies: list[wpb.PolicySnapshot] = []
        self.told: asyncio.Queue[wpb.PolicySnapshot] = asyncio.Queue()
        self.added: asyncio.Queue[wpb.Add] = asyncio.Queue()
        self.on_add: Callable[[wpb.Add], Awaitable[None]] = self.answer("Hi.")
        # The refusal, "" for none, None for no answer at all.
        self.on_policy: Callable[[wpb.PolicySnapshot], str | None] = lambda snapshot: ""
        self.pong: wpb.Pong | None = wpb.Pong()
        self.shadows: asyncio.Queue[wpb.Shadow] = asyncio.Queue()
        # As on_policy; what it reports in heartbeats is the test's to say.
        self.on_shadow: Callable[[wpb.Shadow], str | None] = self.try_policy
        # The explanation of any request, None for one that is gone.
        self.on_explain: Callable[[int], epb.Explanation | None] = lambda request_id: None
        self.step_id = 0
        self._out: asyncio.Queue[wpb.FromWorker] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 << 20)])
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(self.address)
        await self._server.start()

    async def kill(self) -> None:
        """Dies with its connection, as a killed process does."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def Connect(self, requests: AsyncIterator[wpb.ToWorker], context: Any) -> None:
        self._out = asyncio.Queue()
        writer = asyncio.create_task(self._write(context))
        try:
            async for message in requests:
                self._receive(message)
        finally:
            writer.cancel()

    def _receive(self, message: wpb.ToWorker) -> None:
        which = message.WhichOneof("message")
        if which == "hello":
            self._out.put_nowait(wpb.FromWorker(welcome=self.welcome))
        elif which == "policy":
            self.policies.append(message.policy)
            self.told.put_nowait(message.policy)
            refusal = self.on_policy(message.policy)
            if refusal is not None:
                applied = wpb.PolicyApplied(generation=message.policy.generation, refusal=refusal)
                self._out.put_nowait(wpb.FromWorker(policy_applied=applied))
        elif which == "add":
            self.adds.append(message.add)
            self.added.put_nowait(message.add)
            task = asyncio.ensure_future(self.on_add(message.add))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif which == "abort":
            self.aborts.put_nowait(message.abort.request_id)
        elif which == "shadow":
            self.shadows.put_nowait(message.shadow)
            refusal = self.on_shadow(message.shadow)
            if refusal is not None:
                tried = wpb.ShadowApplied(number=message.shadow.number, refusal=refusal)
                self._out.put_nowait(wpb.FromWorker(shadow_applied=tried))
        elif which == "explain":
            explained = wpb.Explained(request_id=message.explain.request_id)
            found = self.on_explain(message.explain.request_id)
            if found is not None:
                explained.explanation.CopyFrom(found)
            self._out.put_nowait(wpb.FromWorker(explained=explained))
        elif which == "ping" and self.pong is not None:
            pong = wpb.Pong()
            pong.CopyFrom(self.pong)
            pong.nonce = message.ping.nonce
            self._out.put_nowait(wpb.FromWorker(pong=pong))

    async def _write(self, context: Any) -> None:
        while True:
            await context.write(await self._out.get())

    def try_policy(self, shadow: wpb.Shadow) -> str:
        """A script: it does, and says so in its heartbeats."""
        self.pong = self.pong or wpb.Pong()
        self.pong.ClearField("shadow")
        if shadow.HasField("snapshot"):
            self.pong.shadow.sha256 = shadow.snapshot.sha256
        return ""

    def send(self, request_id: int, **fields: Any) -> None:
        """One step with one delta."""
        self.step_id += 1
        delta = wpb.Delta(request_id=request_id, **fields)
        self._out.put_nowait(wpb.FromWorker(deltas=wpb.StepDeltas(step_id=self.step_id, deltas=[delta])))

    def begin(self, request_id: int, cached: int = 0) -> None:
        self.send(request_id, queue_position=0)
        self.send(request_id, started=wpb.StartedDelta(cached_tokens=cached, queue_s=0.001))

    def answer(self, text: str) -> Callable[[wpb.Add], Awaitable[None]]:
        """A script: the text byte by byte, then the end-of-sequence token."""

        async def run(add: wpb.Add) -> None:
            self.begin(add.request_id)
            for byte in text.encode():
                self.send(add.request_id, token_ids=[byte])
            self.send(add.request_id, token_ids=[EOS], ended=wpb.EndedDelta(reason="stop", stop_token_id=EOS))

        return run

    async def silent(self, add: wpb.Add) -> None:
        """A script: queued and started, then nothing."""
        self.begin(add.request_id)


class Keys:
    """One key for each kind of caller."""

    def __init__(self) -> None:
        self.shop, self.docs, self.expired, self.admin, self.saas, self.paid = (new_key() for _ in range(6))


def make_policy(keys: Keys) -> Policy:
    """acme with two tenants, and saas, whose keys may act for their children."""
    tiers = {
        "gold": TierPolicy(Tier("gold", 100), max_output_tokens=200),
        "batch": TierPolicy(Tier("batch", 10)),
    }
    nodes = {
        "acme": Node("acme", ("gold",), "tenant:acme", None),
        "acme/shop": Node("acme/shop", ("gold", "batch"), "tenant:acme/shop", None),
        "acme/docs": Node("acme/docs", ("batch",), "tenant:acme/docs", 1),
        "saas": Node("saas", (), "tenant:saas"),
        "saas/paid": Node("saas/paid", ("gold",), "member", members=MemberTemplate(max_members=3, max_in_flight=2)),
        "saas/free": Node("saas/free", ("batch",), "tenant:saas/free"),
    }
    principals = {
        hash_key(PEPPER, keys.shop): Principal("k-shop", "acme/shop", None, True),
        hash_key(PEPPER, keys.docs): Principal("k-docs", "acme/docs"),
        hash_key(PEPPER, keys.expired): Principal("k-old", "acme/shop", datetime.date(2020, 1, 1)),
        hash_key(PEPPER, keys.saas): Principal("k-saas", "saas", may_act_for_children=True),
        hash_key(PEPPER, keys.paid): Principal("k-paid", "saas/paid", may_act_for_children=True),
    }
    return Policy("0" * 64, "version: 1\n", "tenants.yaml", TiersPolicy.VIP, tiers, nodes, principals, {"small": "tiny"})


class Service:
    """A running gateway and a stock client of it."""

    def __init__(self, gateway: Gateway, worker: FakeWorker, keys: Keys) -> None:
        self.gateway = gateway
        self.worker = worker
        self.keys = keys
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}")
        self.admin_channel = grpc.aio.insecure_channel(f"127.0.0.1:{gateway.admin_port}")
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminStub(self.admin_channel)

    def auth(self, key: str | None = None) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {key or self.keys.shop}")]

    def generate(self, request: pb.GenerateRequest, **options: Any) -> Any:
        return self.stub.Generate(request, **({"metadata": self.auth(), "timeout": 20} | options))

    def complete(self, request: pb.GenerateRequest, **options: Any) -> Any:
        return self.stub.Complete(request, **({"metadata": self.auth(), "timeout": 20} | options))

    async def close(self) -> None:
        await self.channel.close()
        await self.admin_channel.close()
        await self.gateway.drain_and_stop(0)


class Refusal:
    """What a stock client can read out of an error."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.message = error.details() or ""
        self.trailers = {str(key): value for key, value in error.trailing_metadata() or ()}
        self.initial = {str(key): value for key, value in error.initial_metadata() or ()}
        self.info = error_details_pb2.ErrorInfo()
        self.violations: dict[str, str] = {}
        self.retry: error_details_pb2.RetryInfo | None = None
        status = status_pb2.Status.FromString(self.trailers.get("grpc-status-details-bin", b""))
        for detail in status.details:
            detail.Unpack(self.info)
            bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
            if detail.Unpack(bad):
                self.violations = {v.field: v.description for v in bad.field_violations}
            if detail.Unpack(retry):
                self.retry = retry

    @property
    def reason(self) -> str:
        return self.info.reason


def make_model_dir(folder: Path) -> Path:
    """A model folder with the tiny tokenizer and its chat template."""
    folder.mkdir()
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"}))
    return folder


async def until(condition: Callable[[], bool]) -> None:
    """Returns once a condition holds; fails after 10 s."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def rest(call: Any) -> list[pb.GenerateEvent]:
    """Reads a stream to its good end."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def refused(call: Any) -> Refusal:
    """Awaits a call (unary or stream) that must fail, and reads the error."""
    try:
        if hasattr(call, "read"):
            await rest(call)
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return Refusal(error)
    raise AssertionError("the call succeeded")


def policy_text(keys: Keys, *, max_output_tokens: int = 200, tenants: str = "", tiers: str = "") -> str:
    """The policy of `make_policy`, as far as files need it, as a file. `max_output_tokens` of gold tells versions apart."""
    return f"""\
version: 1
tiers:
  gold: {{priority: 100, max_output_tokens: {max_output_tokens}}}
  batch: {{priority: 10}}
{tiers}organisations:
  acme:
    tenants:
      shop: {{tiers: [gold, batch], keys: [{{id: k-shop, hash: "{hash_key(PEPPER, keys.shop)}"}}]}}
      docs: {{tiers: [batch], max_in_flight: 1, keys: [{{id: k-docs, hash: "{hash_key(PEPPER, keys.docs)}"}}]}}
{tenants}models: {{tiny: {{aliases: [small]}}}}
"""


@asynccontextmanager
async def following(path: Path, worker: FakeWorker, keys: Keys, model_dir: Path, state_dir: Path) -> AsyncIterator[Service]:
    """A ready gateway that serves by the policy file at `path` and follows it."""
    state_dir.mkdir(mode=0o700, exist_ok=True)
    source = PolicySource(path)
    gateway = Gateway(
        GatewayConfig(port=0, coalesce=0.0),
        source.load(),
        PEPPER,
        hash_key(PEPPER, keys.admin),
        worker.address,
        model_dir,
        MonotonicClock(),
        source=source,
        state_dir=state_dir,
    )
    await gateway.start()
    service = Service(gateway, worker, keys)
    try:
        await gateway.wait_ready(10)
        yield service
    finally:
        await service.close()
