"""The policy snapshot as the worker gets it. What it means there is scheduler/tenancy.py's."""

from __future__ import annotations

from dataclasses import asdict

from fairlane.protos.fairlane.v1 import worker_pb2 as pb
from fairlane.scheduler.tenancy import KVAmount, PolicySnapshot, Shaping, ShapingRule


def snapshot_message(snapshot: PolicySnapshot) -> pb.PolicySnapshot:
    """The snapshot as the worker gets it."""
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
        locality_window_ms=snapshot.locality_window_ms,
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
            ceil=tier.ceil,
        )
    for node in snapshot.nodes:
        message.nodes.add(
            path=node.path,
            weight=node.weight,
            min_share=node.min_share,
            max_running=node.max_running,
            member_weight=node.member_weight,
            member_max_running=node.member_max_running,
            kv_guarantee=_amount(node.kv_guarantee),
            kv_limit=_amount(node.kv_limit),
            member_kv_limit=_amount(node.member_kv_limit),
            shared_domain=node.shared_domain,
            ceil=node.ceil,
        )
    for group in snapshot.groups:
        message.groups.add(name=group.name, kv_guarantee=_amount(group.kv_guarantee), kv_limit=_amount(group.kv_limit))
    return message


def _amount(amount: KVAmount | None) -> pb.KVAmount | None:
    return None if amount is None else pb.KVAmount(share=amount.share, tokens=amount.tokens)
