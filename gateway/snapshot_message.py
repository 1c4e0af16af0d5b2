"""A policy snapshot as the message that a worker gets."""

from __future__ import annotations

from dataclasses import asdict

from fairlane.protos.fairlane.v1 import worker_pb2 as pb
from fairlane.scheduler.tenancy import PolicySnapshot, Shaping, ShapingRule


def snapshot_message(snapshot: PolicySnapshot) -> pb.PolicySnapshot:
    message = pb.PolicySnapshot(
        generation=snapshot.generation,
        sha256=snapshot.sha256,
        tiers_policy=snapshot.tiers_policy.value,
        within_tier=snapshot.within_tier.value,
        preempt_gap_ms=snapshot.preempt_gap_ms,
        cost=snapshot.cost.value,
        within_tenant=snapshot.within_tenant.value,
        plugin=snapshot.plugin,
        predict_output=snapshot.predict_output,
    )
    for tier in snapshot.tiers:
        rule = tier.shaping if isinstance(tier.shaping, ShapingRule) else None
        message.tiers.add(
            name=tier.name,
            priority=tier.priority,
            weight=tier.weight,
            min_share=tier.min_share,
            patience_s=tier.patience_s,
            shaping=tier.shaping.value if isinstance(tier.shaping, Shaping) else "",
            shaping_rule=None if rule is None else pb.ShapingSpec(**asdict(rule)),
            ttft_target_s=tier.ttft_target_s,
            tpot_target_s=tier.tpot_target_s,
        )
    for node in snapshot.nodes:
        message.nodes.add(
            path=node.path,
            weight=node.weight,
            min_share=node.min_share,
            max_running=node.max_running,
            member_weight=node.member_weight,
            member_max_running=node.member_max_running,
        )
    return message
