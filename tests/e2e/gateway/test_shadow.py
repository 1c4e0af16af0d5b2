"""A policy that is tried on live traffic, from the command to the engine and back: gateway and worker over gRPC. The policy in
force alone is obeyed, the counts reach whoever asks, and a shadow outlives a lost connection but not its own faults."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from engine_worker import EngineWorker, serving
from fairlane.gateway.config import GatewayConfig
from fairlane.protos.fairlane.v1 import admin_pb2, shadow_pb2
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from fairlane.protos.fairlane.v1 import worker_pb2 as wpb
from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.fake_executor import crc_token
from fairlane.scheduler.policies.vip import VIPPolicy
from fairlane.scheduler.scheduler import SchedulerLimits
from fairlane.scheduler.shadow.twin import Twin
from gateway_world import EOS, VOCAB, FakeWorker, Keys, Service, following, policy_text, until

pytestmark = pytest.mark.asyncio

Run = Callable[..., Awaitable[Any]]
GOLD, BATCH = pb.GenerateRequest(prompt="g", tier="gold"), pb.GenerateRequest(prompt="b", tier="batch")
NONE = wpb.Shadow()


def text_of(keys: Keys, tiers: str) -> str:
    """`tiers`: between tiers."""
    return policy_text(keys).replace("version: 1\n", f"version: 1\nscheduler: {{tiers: {tiers}}}\n")


def request_of(service: Service, **tiers: int) -> admin_pb2.ShadowPolicyRequest:
    return admin_pb2.ShadowPolicyRequest(text=policy_text(service.keys, **tiers), name="new.yaml")


async def status_of(service: Service) -> admin_pb2.ShadowStatus:
    return await service.admin.GetShadow(admin_pb2.GetShadowRequest(), metadata=service.auth(service.keys.admin))


async def try_policy(service: Service, request: admin_pb2.ShadowPolicyRequest) -> admin_pb2.ShadowPolicyResponse:
    return await service.admin.ShadowPolicy(request, metadata=service.auth(service.keys.admin))


async def told(worker: FakeWorker) -> wpb.Shadow:
    """What the worker is asked to try next, without the number."""
    shadow = await asyncio.wait_for(worker.shadows.get(), 10)
    shadow.ClearField("number")
    return shadow


# -- with the real engine ------------------------------------------------------------------------------------------------------


class Gate:
    """Holds the fake model back, so that a test decides what has arrived before a step."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def close(self) -> None:
        self.entered.clear()
        self.opened.clear()

    def next_token(self, context: list[int], vocab_size: int) -> int:
        self.entered.set()
        assert self.opened.wait(10)
        return crc_token(context, vocab_size)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest_asyncio.fixture
async def engine(tmp_path: Path, gate: Gate) -> AsyncIterator[EngineWorker]:
    """One request at a time."""
    info = ExecutorInfo("tiny", VOCAB, 512, 16, 25, (EOS,))
    limits = SchedulerLimits(max_num_seqs=1, max_num_resident=1, max_model_len=512)
    async with serving(f"unix:{tmp_path}/engine.sock", info, limits, gate.next_token) as worker:
        yield worker
        gate.opened.set()


@pytest_asyncio.fixture
async def live(path: Path, engine: EngineWorker, model_dir: Path, tmp_path: Path) -> AsyncIterator[Service]:
    """A gateway whose policy in force is FCFS."""
    keys = Keys()
    path.write_text(text_of(keys, "fcfs"))
    async with following(path, engine, keys, model_dir, tmp_path / "state") as service:  # type: ignore[arg-type]
        yield service


async def in_order(service: Service, engine: EngineWorker, gate: Gate) -> list[pb.CompleteResponse]:
    """Batch, batch, batch and gold: the first one runs, the others have arrived behind it in this order."""
    calls = [asyncio.ensure_future(service.complete(BATCH))]
    assert await asyncio.to_thread(gate.entered.wait, 10)
    for number, request in enumerate((BATCH, BATCH, GOLD)):
        calls.append(asyncio.ensure_future(service.complete(request)))
        await until(lambda behind=number + 1: engine.boxes._items.qsize() >= behind)
    gate.opened.set()
    return await asyncio.gather(*calls)


def served_as(answers: list[pb.CompleteResponse]) -> list[tuple[str, float]]:
    """What each got, and how long it waited by the engine's clock, which only steps move."""
    return [(one.text, round(one.finished.timing.queue_ms, 3)) for one in answers]


async def test_what_vip_would_do_beside_fcfs_is_counted_by_tenant_and_nobody_is_served_by_it(
    live: Service, engine: EngineWorker, gate: Gate
) -> None:
    """FCFS lets the three batch requests in, then gold. VIP would have let gold in instead of the second and of the third."""
    without = await in_order(live, engine, gate)
    await until(lambda: engine.scheduler.num_unfinished == 0)
    gate.close()
    asked = admin_pb2.ShadowPolicyRequest(text=text_of(live.keys, "vip"), name="vip.yaml")
    answer = await try_policy(live, asked)
    beside = await in_order(live, engine, gate)
    await until(lambda: engine.scheduler.num_unfinished == 0)
    status = await status_of(live)
    rows = {(row.node, row.tier): (row.instead, row.displaced) for row in status.report.rows}
    assert (status.running, status.name, status.sha256, status.dropped) == (True, "vip.yaml", answer.sha256, "")
    assert (rows[("acme/shop", "gold")], rows[("acme/shop", "batch")]) == ((2, 0), (0, 2))
    assert (status.report.admissions, status.report.different_steps >= 2) == (4, True)
    assert served_as(beside) == served_as(without)


async def test_the_same_policy_again_goes_on_counting_and_another_begins_anew(
    live: Service, engine: EngineWorker, gate: Gate
) -> None:
    vip, fair = (admin_pb2.ShadowPolicyRequest(text=text_of(live.keys, tiers), name=tiers) for tiers in ("vip", "fair"))
    await try_policy(live, vip)
    await in_order(live, engine, gate)
    await until(lambda: engine.scheduler.num_unfinished == 0)
    await try_policy(live, vip)
    again = (await status_of(live)).report.admissions
    await try_policy(live, fair)
    assert (again, (await status_of(live)).report.admissions) == (4, 0)


async def test_a_shadow_that_raises_is_dropped_and_every_request_is_answered(
    live: Service, engine: EngineWorker, gate: Gate
) -> None:
    inner = VIPPolicy.push

    def push(self: Any, sequence: Any, since_s: float) -> None:
        if isinstance(sequence, Twin):
            raise ZeroDivisionError("of the shadow's own")
        inner(self, sequence, since_s)

    with patch.object(VIPPolicy, "push", push):
        await try_policy(live, admin_pb2.ShadowPolicyRequest(text=text_of(live.keys, "vip"), name="vip.yaml"))
        completed = await in_order(live, engine, gate)
    status = await status_of(live)
    assert (status.running, status.dropped) == (False, "push raised ZeroDivisionError: of the shadow's own")
    assert [one.finished.usage.completion_tokens > 0 for one in completed] == [True] * 4


async def test_what_the_worker_does_not_know_is_refused_in_words(live: Service, engine: EngineWorker, refused: Any) -> None:
    text = text_of(live.keys, "vip").replace("{tiers: vip}", "{plugin: nobody_has_this}")
    asked = admin_pb2.ShadowPolicyRequest(text=text, name="x")
    refusal = await refused(live.admin.ShadowPolicy(asked, metadata=live.auth(live.keys.admin)))
    assert (refusal.reason, "nobody_has_this" in refusal.message, engine.scheduler.shadow) == ("POLICY_REFUSED", True, None)


async def test_a_policy_that_charges_by_another_cost_is_refused_in_words(live: Service, refused: Any) -> None:
    text = text_of(live.keys, "vip").replace("{tiers: vip}", "{tiers: vip, cost: roofline}")
    asked = admin_pb2.ShadowPolicyRequest(text=text, name="x")
    refusal = await refused(live.admin.ShadowPolicy(asked, metadata=live.auth(live.keys.admin)))
    assert (refusal.reason, "cost: roofline cannot be shadowed while tokens is in force" in refusal.message) == (
        "POLICY_REFUSED",
        True,
    )


# -- the way there -------------------------------------------------------------------------------------------------------------


async def test_the_worker_gets_the_whole_policy_and_the_one_in_force_stays(served: Service) -> None:
    answer = await try_policy(served, request_of(served, max_output_tokens=50))
    shadow = await told(served.worker)
    assert (shadow.snapshot.sha256, shadow.snapshot.generation) == (answer.sha256, 0)
    assert [tier.name for tier in shadow.snapshot.tiers] == ["gold", "batch"]
    assert (answer.generation, served.gateway.policy_generation, len(served.worker.policies)) == (1, 1, 1)


async def test_a_refusal_says_why_and_an_earlier_shadow_stays(served: Service, refused: Any) -> None:
    await try_policy(served, request_of(served, max_output_tokens=50))
    served.worker.on_shadow = lambda shadow: "unknown policy"
    call = served.admin.ShadowPolicy(request_of(served, max_output_tokens=60), metadata=served.auth(served.keys.admin))
    refusal = await refused(call)
    assert (refusal.reason, refusal.message) == ("POLICY_REFUSED", "the worker does not try it: unknown policy")
    assert served.gateway.worker.shadow.running


async def test_a_worker_that_does_not_answer_is_told_again_what_was_before(
    served: Service, gateway_config: GatewayConfig, refused: Any
) -> None:
    served.worker.on_shadow = lambda shadow: None
    served.gateway.worker.shadow._timeout_s = 0.05
    refusal = await refused(served.admin.ShadowPolicy(request_of(served), metadata=served.auth(served.keys.admin)))
    asked, restated = await told(served.worker), await told(served.worker)
    assert (refusal.reason, asked.HasField("snapshot"), restated) == ("POLICY_REFUSED", True, NONE)


async def test_findings_come_with_their_places_and_nothing_is_tried(served: Service, refused: Any) -> None:
    text = policy_text(served.keys).replace("priority", "priorty")
    call = served.admin.ShadowPolicy(
        admin_pb2.ShadowPolicyRequest(text=text, name="new.yaml"), metadata=served.auth(served.keys.admin)
    )
    refusal = await refused(call)
    assert (refusal.reason, {place.split(":")[0] for place in refusal.violations}) == ("POLICY_INVALID", {"new.yaml"})
    assert served.worker.shadows.empty()


async def test_without_a_worker_there_is_nothing_to_try_it_on(served: Service, refused: Any) -> None:
    await served.worker.kill()
    await until(lambda: not served.gateway.worker.ready)
    refusal = await refused(served.admin.ShadowPolicy(request_of(served), metadata=served.auth(served.keys.admin)))
    assert refusal.reason == "NO_READY_WORKER"


async def test_a_tenants_key_may_not_try_a_policy(served: Service, refused: Any) -> None:
    refusal = await refused(served.admin.ShadowPolicy(request_of(served), metadata=served.auth()))
    assert refusal.reason == "UNAUTHENTICATED"


# -- its life ------------------------------------------------------------------------------------------------------------------


async def reconnect(service: Service, epoch: int) -> None:
    """The session ends and a worker of this epoch is there."""
    sessions = service.gateway.worker.counters.sessions
    await service.worker.kill()
    service.worker.welcome.epoch = epoch
    await service.worker.start()
    await until(lambda: service.gateway.worker.ready and service.gateway.worker.counters.sessions > sessions)


async def test_it_outlives_a_lost_connection_and_one_restart_of_the_worker(served: Service) -> None:
    await try_policy(served, request_of(served))
    asked = await told(served.worker)
    await reconnect(served, epoch=1)
    after_loss = await told(served.worker)
    await reconnect(served, epoch=2)
    after_restart = await told(served.worker)
    await until(lambda: served.gateway.worker.shadow.running)
    assert (after_loss, after_restart) == (asked, asked)


async def test_a_worker_that_is_restarted_again_does_not_get_it_any_more(served: Service) -> None:
    await try_policy(served, request_of(served))
    await told(served.worker)
    for epoch in (2, 3):
        await reconnect(served, epoch)
    asked = [await told(served.worker), await told(served.worker)]
    status = await status_of(served)
    assert (asked[0].HasField("snapshot"), asked[1], status.running) == (True, NONE, False)
    assert status.dropped == "the worker was started anew 2 times while it was tried, perhaps because of it"


async def test_one_that_failed_is_not_tried_again_by_itself(served: Service) -> None:
    await try_policy(served, request_of(served))
    await told(served.worker)
    served.worker.pong.shadow.fault = "push raised KeyError: 7"
    dropped = (await status_of(served)).dropped
    await reconnect(served, epoch=1)
    assert (dropped, await told(served.worker)) == ("push raised KeyError: 7", NONE)


async def test_one_that_somebody_else_ended_at_the_worker_is_not_taken_for_running(served: Service) -> None:
    await try_policy(served, request_of(served))
    await told(served.worker)
    served.worker.pong.ClearField("shadow")
    status = await status_of(served)
    assert (status.running, status.dropped) == (False, "it was ended at the worker by somebody else")


async def test_its_end_is_told_the_worker_and_answers_the_last_counts(served: Service) -> None:
    await try_policy(served, request_of(served))
    await told(served.worker)
    served.worker.pong.shadow.steps = 77
    last = await served.admin.StopShadow(admin_pb2.StopShadowRequest(), metadata=served.auth(served.keys.admin))
    status = await status_of(served)
    assert (await told(served.worker), last.running, last.report.steps) == (NONE, False, 77)
    assert status == admin_pb2.ShadowStatus()


async def test_an_end_while_the_worker_is_away_reaches_it_when_it_is_back(served: Service) -> None:
    await try_policy(served, request_of(served))
    await told(served.worker)
    await served.worker.kill()
    await until(lambda: not served.gateway.worker.connected)
    await served.admin.StopShadow(admin_pb2.StopShadowRequest(), metadata=served.auth(served.keys.admin))
    await served.worker.start()
    assert await told(served.worker) == NONE


async def test_a_gateway_that_was_never_asked_leaves_a_shadow_alone_and_shows_it(served: Service) -> None:
    served.worker.pong = wpb.Pong(shadow=shadow_pb2.ShadowReport(sha256="ab", steps=5))
    await reconnect(served, epoch=1)
    status = await status_of(served)
    assert (served.worker.shadows.empty(), status.running, status.name, status.report.steps) == (True, True, "", 5)


# -- what people see -------------------------------------------------------------------------------------------------------------

REPORT = shadow_pb2.ShadowReport(
    over_s=60.0,
    spent_s=0.9,
    steps=5000,
    different_steps=250,
    admissions=120,
    evictions=4,
    rows=[
        shadow_pb2.ShadowRow(tier="gold", node="acme/shop", steps=200, instead=12, sooner=3),
        shadow_pb2.ShadowRow(tier="batch", node="[b]/x", steps=60, displaced=12, later=1, evicted=2),
        shadow_pb2.ShadowRow(tier="batch", steps=9, paused=40),
    ],
    largest=[
        shadow_pb2.ShadowDifference(
            kind=shadow_pb2.SHADOW_KIND_INSTEAD,
            whom_tier="gold",
            whom_node="acme/shop",
            other_tier="batch",
            other_node="[b]/x",
            count=12,
        ),
        shadow_pb2.ShadowDifference(kind=shadow_pb2.SHADOW_KIND_PAUSES, whom_tier="batch", count=40),
    ],
    totals=[
        shadow_pb2.ShadowTotal(kind=shadow_pb2.SHADOW_KIND_INSTEAD, tier="gold", count=12),
        shadow_pb2.ShadowTotal(kind=shadow_pb2.SHADOW_KIND_PAUSES, tier="batch", count=40),
    ],
)


@pytest.fixture
def new(served: Service, tmp_path: Path) -> Path:
    file = tmp_path / "new.yaml"
    file.write_text(policy_text(served.keys, max_output_tokens=50))
    return file


def report(service: Service) -> None:
    service.worker.pong.shadow.MergeFrom(REPORT)


async def test_the_command_says_what_is_tried_and_shows_the_counts(served: Service, run: Run, new: Path) -> None:
    begun = await run("policy", "shadow", str(new))
    report(served)
    shown = (await run("policy", "shadow")).stdout.splitlines()
    assert begun.stdout.startswith(f"{new}: tried beside generation 1, which alone is obeyed; sha256 ")
    assert shown[0].startswith(f"{new}, sha256 ") and shown[0].endswith(": tried beside the policy in force")
    assert [" ".join(line.split()) for line in shown[1:]] == [
        "5000 steps in 60 s; in 250 of them (5.0%) it would have done something else; in force: 120 admissions, 4 evictions",
        "it takes 1.50% of the engine's time",
        "",
        "node tier steps admitted left waiting evicted paused",
        "acme/shop gold 200 15 0 0 0",
        "[b]/x batch 60 0 13 2 0",
        "(others) batch 9 0 0 0 40",
        "",
        "What it would do, most often first",
        "12 × acme/shop in gold admitted instead of [b]/x in batch",
        "40 × a token of others in batch paused",
    ]


async def test_off_shows_the_last_counts_and_then_nothing_is_tried(served: Service, run: Run, new: Path) -> None:
    await run("policy", "shadow", str(new))
    report(served)
    ended = await run("policy", "shadow", "--off", "--json")
    after = await run("policy", "shadow")
    assert (json.loads(ended.stdout)["report"]["different_steps"], after.stdout) == (
        "250",
        "No policy is tried. fairlane policy shadow FILE begins.\n",
    )


async def test_a_dropped_one_is_told_last_and_by_exit_code_and_in_the_status(served: Service, run: Run, new: Path) -> None:
    await run("policy", "shadow", str(new))
    report(served)
    served.worker.pong.shadow.fault = "it took 60% of the engine's time, more than 25%"
    shown, status = await run("policy", "shadow"), await run("status")
    says = "DROPPED, it is not tried any more: it took 60% of the engine's time, more than 25%"
    assert (shown.exit_code, shown.stdout.splitlines()[-1]) == (1, says)
    assert f"THE POLICY THAT WAS TRIED ({new}) WAS DROPPED: it took 60%" in status.stdout


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (("new.yaml", "--off"), 2, "not both"),
        (("/nonexistent",), 2, "there is no such file"),
    ],
)
async def test_misuse_is_exit_code_2(run: Run, arguments: tuple[str, ...], exit_code: int, says: str) -> None:
    result = await run("policy", "shadow", *arguments)
    assert (result.exit_code, result.stdout, says in result.stderr) == (exit_code, "", True)


async def test_a_file_with_errors_is_not_tried_and_every_error_has_its_place(served: Service, run: Run, new: Path) -> None:
    new.write_text(new.read_text().replace("priority", "priorty"))
    result = await run("policy", "shadow", str(new))
    assert all(line.startswith(f"{new}:") for line in result.stderr.splitlines())
    assert (result.exit_code, result.stdout, served.worker.shadows.empty()) == (1, "", True)


def samples(service: Service) -> dict[tuple[str, ...], float]:
    """Of the shadow, by name and label values."""
    from prometheus_client import generate_latest

    text = generate_latest(service.gateway._metrics.registry).decode()
    families = [family for family in text_string_to_metric_families(text) if family.name.startswith("fairlane_shadow")]
    return {(one.name, *sorted(one.labels.values())): one.value for family in families for one in family.samples}


async def test_the_metrics_have_the_counts_by_kind_and_tier_while_it_runs(served: Service, run: Run, new: Path) -> None:
    before = samples(served)
    await run("policy", "shadow", str(new))
    report(served)
    await status_of(served)
    during = samples(served)
    served.worker.pong.shadow.fault = "x"
    await status_of(served)
    assert before == {("fairlane_shadow_running",): 0.0, ("fairlane_shadow_dropped",): 0.0}
    assert during == {
        ("fairlane_shadow_running",): 1.0,
        ("fairlane_shadow_dropped",): 0.0,
        ("fairlane_shadow_steps_total",): 5000.0,
        ("fairlane_shadow_different_steps_total",): 250.0,
        ("fairlane_shadow_seconds_total",): 0.9,
        ("fairlane_shadow_differences_total", "gold", "instead"): 12.0,
        ("fairlane_shadow_differences_total", "batch", "pauses"): 40.0,
    }
    assert samples(served) == {("fairlane_shadow_running",): 0.0, ("fairlane_shadow_dropped",): 1.0}
