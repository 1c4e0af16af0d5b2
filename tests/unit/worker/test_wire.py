"""What a worker refuses of a message, whichever gateway sent it."""

from __future__ import annotations

import pytest

from fairlane.gateway.snapshot_message import snapshot_message
from fairlane.protos.fairlane.v1 import worker_pb2 as pb
from fairlane.scheduler.request import RequestId
from fairlane.scheduler.tenancy import (
    CostName,
    GroupShare,
    KVAmount,
    NodeShare,
    PolicySnapshot,
    Shaping,
    ShapingRule,
    Tier,
    TiersPolicy,
    WithinTenant,
    WithinTier,
)
from fairlane.worker.wire import ProtocolError, request_from_add, snapshot_from_wire

NAN = float("nan")
GOOD = {"top_p": 1.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", NAN),
        ("temperature", -1.0),
        ("top_p", -3.0),
        ("top_p", 0.0),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
    ],
)
def test_sampling_outside_the_public_bounds_is_refused(name: str, value: float) -> None:
    sampling = pb.WorkerSampling(**{**GOOD, name: value})
    with pytest.raises(ProtocolError, match=name):
        request_from_add(pb.Add(prompt_token_ids=[1], cache_mode="none", sampling=sampling), RequestId(1), 0.0, 10)


@pytest.mark.parametrize("name", ["timeout_s", "max_wait_s"])
def test_times_that_are_no_numbers_are_refused(name: str) -> None:
    add = pb.Add(prompt_token_ids=[1], cache_mode="none", sampling=pb.WorkerSampling(**GOOD), **{name: NAN})
    with pytest.raises(ProtocolError, match=name):
        request_from_add(add, RequestId(1), 0.0, 10)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_share", 7.0),
        ("min_share", NAN),
        ("patience_s", NAN),
        ("ttft_target_s", NAN),
        ("tpot_target_s", -1.0),
        ("ceil", 0.0),
        ("ceil", 1.5),
        ("weight", -1.0),
    ],
)
def test_tiers_with_impossible_values_are_refused(name: str, value: float) -> None:
    tier = pb.TierSpec(name="a", shaping="off", **{name: value})
    with pytest.raises(ProtocolError, match=name):
        snapshot_from_wire(pb.PolicySnapshot(generation=1, tiers_policy="vip", tiers=[tier]))


def test_a_tier_carries_its_shaping_by_name_or_in_detail() -> None:
    rules = [
        pb.TierSpec(name="a", shaping="strict"),
        pb.TierSpec(name="b", shaping_rule=pb.ShapingSpec(prefill_share=0.8, max_step_s=0.04)),
    ]
    snapshot = snapshot_from_wire(pb.PolicySnapshot(generation=1, tiers_policy="vip", tiers=rules))
    assert [tier.shaping for tier in snapshot.tiers] == [Shaping.STRICT, ShapingRule(0.8, False, 0.04)]


def test_kv_quotas_come_out_of_the_wire_as_they_went_in() -> None:
    share, tokens = KVAmount(share=0.3), KVAmount(tokens=9000)
    nodes = (
        NodeShare("a", kv_guarantee=share, kv_limit=tokens, member_kv_limit=share),
        NodeShare("a/b", shared_domain="group:g", ceil=0.2),
    )
    groups = (GroupShare("g", kv_guarantee=tokens), GroupShare("h", kv_limit=share))
    sent = PolicySnapshot(1, "0", TiersPolicy.VIP, (Tier("t", 1),), nodes=nodes, groups=groups)
    assert snapshot_from_wire(snapshot_message(sent)) == sent


def test_a_kv_share_above_everything_is_refused() -> None:
    node = pb.NodeSpec(path="a", kv_limit=pb.KVAmount(share=1.5))
    tier = pb.TierSpec(name="a", shaping="off")
    with pytest.raises(ProtocolError, match="KV share"):
        snapshot_from_wire(pb.PolicySnapshot(generation=1, tiers_policy="vip", tiers=[tier], nodes=[node]))


def test_a_snapshot_carries_shares_and_the_gap() -> None:
    node = pb.NodeSpec(path="a/b", weight=2, min_share=0.25, max_running=3, member_weight=0.5, member_max_running=1)
    wire = pb.PolicySnapshot(
        generation=1,
        tiers_policy="fair",
        within_tier="fair",
        preempt_gap_ms=50,
        cost="kv_time",
        within_tenant="deadline",
        predict_output=True,
        locality_window_ms=20,
        tiers=[pb.TierSpec(name="a", shaping="off", ttft_target_s=0.3)],
        nodes=[node],
    )
    snapshot = snapshot_from_wire(wire)
    assert (snapshot.within_tier, snapshot.preempt_gap_ms, snapshot.cost) == (WithinTier.FAIR, 50, CostName.KV_TIME)
    assert (snapshot.within_tenant, snapshot.tiers) == (WithinTenant.DEADLINE, (Tier("a", 0, ttft_target_s=0.3),))
    assert (snapshot.predict_output, snapshot.locality_window_ms) == (True, 20)
    assert snapshot.nodes == (NodeShare("a/b", 2, 0.25, 3, 0.5, 1),)
