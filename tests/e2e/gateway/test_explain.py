"""Explain through a real gateway: a tenant sees itself, tiers and counts; an operator sees names; a flood of questions reaches
the worker one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from fairlane.cli import app
from fairlane.cli.explanation import show
from fairlane.gateway.explainer import Explainer, for_tenant
from fairlane.protos.fairlane.v1 import admin_pb2
from fairlane.protos.fairlane.v1 import explain_pb2 as epb
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from gateway_world import FakeWorker, Service

pytestmark = pytest.mark.asyncio

REQUEST = pb.GenerateRequest(prompt="x", request_id="request-1", tier="batch")
E = epb.Explanation
WAITING = epb.Explanation(
    state=E.STATE_WAITING,
    waited_s=12.0,
    reasons=[E.REASON_RANK, E.REASON_BLOCKS],
    rank=8,
    ahead=[
        epb.Party(tier="gold", node="saas/paid/alice", requests=4),
        epb.Party(tier="gold", node="saas/paid/bob", requests=1),
        epb.Party(tier="batch", node="acme/shop", requests=2),
    ],
    holders=[epb.Party(tier="gold", node="acme/docs", requests=3, evictable=1)],
    blocks_needed=9,
    blocks_free=4,
    blocks_missing=6,
    estimated_start_s=30.0,
    preemptions=2,
    evictions=[
        epb.EvictionRecord(ago_s=5.0, kind="swapped", reason="higher_rank", by_tier="gold", by_node="saas/paid/alice"),
        epb.EvictionRecord(ago_s=1.0, kind="recomputed", reason="kv_capacity", by_tier="batch", by_node="acme/shop"),
    ],
)


async def queued(service: Service) -> Any:
    async def queue(add: Any) -> None:
        service.worker.send(add.request_id, queue_position=7)

    service.worker.on_add = queue
    service.worker.on_explain = lambda request_id: WAITING if request_id == service.worker.adds[0].request_id else None
    call = service.generate(REQUEST)
    assert (await call.read()).queued.position == 7
    return call


async def test_a_tenant_sees_itself_and_of_others_tiers_and_counts(service: Service) -> None:
    call = await queued(service)
    shown = await service.stub.Explain(pb.ExplainRequest(request_id="request-1"), metadata=service.auth())
    call.cancel()
    assert [(party.tier, party.node, party.requests) for party in shown.ahead] == [("gold", "", 5), ("batch", "acme/shop", 2)]
    assert [(party.node, party.requests, party.evictable) for party in shown.holders] == [("", 3, 1)]
    assert [(eviction.by_tier, eviction.by_node) for eviction in shown.evictions] == [("gold", ""), ("batch", "acme/shop")]
    assert (shown.rank, shown.tier, shown.blocks_missing, shown.estimated_start_s) == (8, "batch", 6, 30.0)
    assert [name for name in (b"saas", b"alice", b"docs") if name in shown.SerializeToString()] == []


async def test_a_node_whose_name_begins_like_ones_own_is_another(service: Service) -> None:
    found = epb.Explanation(ahead=[epb.Party(tier="gold", node="acme/shopping", requests=1)])
    assert for_tenant(found, "acme/shop").ahead[0].node == ""


async def test_an_operator_sees_every_name(service: Service) -> None:
    call = await queued(service)
    asked = admin_pb2.ExplainRequestRequest(node="acme/shop", request_id="request-1")
    shown = await service.admin.ExplainRequest(asked, metadata=service.auth(service.keys.admin))
    call.cancel()
    expected = epb.Explanation()
    expected.CopyFrom(WAITING)
    expected.tier = "batch"
    assert shown == expected


async def test_a_foreign_request_is_as_unknown_as_one_that_never_was(service: Service, refused: Any) -> None:
    call = await queued(service)
    ask = pb.ExplainRequest(request_id="request-1")
    foreign = await refused(service.stub.Explain(ask, metadata=service.auth(service.keys.docs)))
    never = await refused(service.stub.Explain(pb.ExplainRequest(request_id="nobody-1"), metadata=service.auth()))
    call.cancel()
    assert (foreign.reason, never.reason, foreign.message) == ("REQUEST_NOT_FOUND", "REQUEST_NOT_FOUND", never.message)


async def test_a_request_that_ends_while_it_is_asked_about_is_not_found(service: Service, refused: Any) -> None:
    call = await queued(service)
    service.worker.on_explain = lambda request_id: None
    refusal = await refused(service.stub.Explain(pb.ExplainRequest(request_id="request-1"), metadata=service.auth()))
    call.cancel()
    assert refusal.reason == "REQUEST_NOT_FOUND"


async def test_a_worker_that_dies_while_it_is_asked_leaves_nobody_waiting(
    service: Service, worker: FakeWorker, refused: Any
) -> None:
    call = await queued(service)
    asked = asyncio.Event()

    def die(request_id: int) -> epb.Explanation | None:
        asked.set()
        raise ConnectionError("dies")  # ends its stream

    worker.on_explain = die
    refusal = await refused(service.stub.Explain(pb.ExplainRequest(request_id="request-1"), metadata=service.auth()))
    call.cancel()
    assert (asked.is_set(), refusal.reason) == (True, "REQUEST_NOT_FOUND")


async def test_more_questions_than_anybody_needs_are_overloaded_and_the_rest_answered(service: Service) -> None:
    call = await queued(service)
    service.gateway._service._explainer = Explainer(service.gateway.worker, interval_s=0.0)
    ask = pb.ExplainRequest(request_id="request-1")
    calls = [service.stub.Explain(ask, metadata=service.auth()) for _ in range(64)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    call.cancel()
    codes = {outcome.code() for outcome in outcomes if isinstance(outcome, grpc.aio.AioRpcError)}
    answered = [outcome for outcome in outcomes if isinstance(outcome, epb.Explanation)]
    assert (codes <= {grpc.StatusCode.UNAVAILABLE}, len(answered) >= 16) == (True, True)


async def test_a_request_that_is_not_at_the_worker_yet_says_so(service: Service) -> None:
    ticket = type("Ticket", (), {"worker_id": None, "tier": "gold"})()
    found = await Explainer(service.gateway.worker).explain(ticket)
    assert (found.state, found.tier) == (E.STATE_ARRIVED, "gold")


async def test_the_command_says_it_in_words(service: Service) -> None:
    call = await queued(service)
    environment = {
        "FAIRLANE_ADMIN_KEY": service.keys.admin,
        "FAIRLANE_ADMIN_TARGET": f"127.0.0.1:{service.gateway.admin_port}",
    }
    run: Callable[..., Awaitable[Any]] = asyncio.to_thread
    shown = await run(CliRunner().invoke, app, ["requests", "explain", "acme/shop", "request-1"], env=environment)
    call.cancel()
    assert shown.stdout.splitlines() == [
        "acme/shop request-1: waits in batch for 12.0 s, rank 8",
        "  rank: before it go 4 of saas/paid/alice in gold, 1 of saas/paid/bob in gold, 2 of acme/shop in batch",
        "  blocks: needs 9, 4 are free, 6 are missing beside those that run",
        "  running: 3 of acme/docs in gold (it may take the blocks of 1)",
        "  may start in 30 s, as requests started lately",
        "  lost its blocks 2 times",
        "  5.0 s ago: swapped (higher_rank) for saas/paid/alice in gold",
        "  1.0 s ago: recomputed (kv_capacity) for acme/shop in batch",
    ]


async def test_the_command_names_the_limit_that_is_in_the_way(capsys: Any) -> None:
    accounts = [epb.KVAccount(node="acme/shop", used=4, guarantee=3, limit=9, is_full=True), epb.KVAccount(node="acme", used=7)]
    answer = epb.Explanation(
        state=E.STATE_WAITING, tier="batch", reasons=[E.REASON_KV_LIMIT], blocks_needed=6, blocks_missing=1, kv_accounts=accounts
    )
    show("acme/shop request-1", answer)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  kv_limit: acme/shop has 4 KV blocks, its kv_limit is 9; it needs 6, 1 are missing",
        "  KV cache of acme/shop: 4 blocks, 3 are guaranteed",
    ]


async def test_the_command_names_the_ceil_that_binds_of_a_stream_that_pauses_too(capsys: Any) -> None:
    ceilings = [
        epb.BindingCeil(tier="batch", share=0.6, opens_in_s=0.25),
        epb.BindingCeil(node="acme", share=0.125, opens_in_s=3),
    ]
    show("acme/shop request-1", epb.Explanation(state=E.STATE_PAUSED, tier="batch", ceilings=ceilings))
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  ceil: tier batch has had its 60% of the worker's time, goes on in 0.2 s",
        "  ceil: acme has had its 12.5% of the worker's time, goes on in 3.0 s",
    ]
