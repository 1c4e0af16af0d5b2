"""An explanation as the gateway gets it: with the names of nodes, the largest parties first and the rest as one."""

from __future__ import annotations

from collections.abc import Iterable

from fairlane.protos.fairlane.v1 import explain_pb2 as pb
from fairlane.protos.fairlane.v1 import worker_pb2 as worker_pb
from fairlane.scheduler.ceilings import Binding
from fairlane.scheduler.explain import Explanation, Party, Reason, State
from fairlane.scheduler.policies.caps import tier_of_gate
from fairlane.scheduler.stats import AccountStats, CeilStats

# Parties named in a message, so that it stays small however many tenants there are; the rest is counted by tier.
MAX_PARTIES = 50

_STATES = {
    State.WAITING: pb.Explanation.STATE_WAITING,
    State.RUNNING: pb.Explanation.STATE_RUNNING,
    State.PAUSED: pb.Explanation.STATE_PAUSED,
}
_REASONS = {
    Reason.CAP: pb.Explanation.REASON_CAP,
    Reason.RANK: pb.Explanation.REASON_RANK,
    Reason.SLOTS: pb.Explanation.REASON_SLOTS,
    Reason.BLOCKS: pb.Explanation.REASON_BLOCKS,
    Reason.STEP: pb.Explanation.REASON_STEP,
    Reason.KV_LIMIT: pb.Explanation.REASON_KV_LIMIT,
    Reason.LOCALITY: pb.Explanation.REASON_LOCALITY,
    Reason.CEIL: pb.Explanation.REASON_CEIL,
}


def explanation_to_wire(found: Explanation) -> pb.Explanation:
    """Without the tier, which who asks knows."""
    return pb.Explanation(
        state=_STATES[found.state],
        waited_s=found.waited_s,
        reasons=[_REASONS[reason] for reason in found.reasons],
        rank=found.rank,
        ahead=_parties(found.ahead),
        holders=_parties(found.holders),
        caps=[pb.BindingCap(node=cap.node, limit=cap.limit, running=cap.running) for cap in found.caps],
        blocks_needed=found.blocks_needed,
        blocks_free=found.blocks_free,
        blocks_missing=found.blocks_missing,
        is_owed=found.is_owed,
        estimated_start_s=found.estimated_start_s,
        preemptions=found.preemptions,
        evictions=[
            pb.EvictionRecord(
                ago_s=ago_s,
                kind=eviction.kind.value,
                reason=eviction.reason.value,
                by_tier=eviction.by.tier,
                by_node=eviction.by.tenant,
            )
            for ago_s, eviction in found.evictions
        ],
        computed_tokens=found.computed_tokens,
        tokens=found.tokens,
        is_partial=found.is_partial,
        kv_accounts=[account_to_wire(account, is_full=account.name == found.full_account) for account in found.kv_accounts],
        ceilings=[_ceil(binding) for binding in found.ceilings],
    )


def account_to_wire(account: AccountStats, *, is_full: bool = False) -> pb.KVAccount:
    return pb.KVAccount(node=account.name, used=account.used, guarantee=account.guarantee, limit=account.limit, is_full=is_full)


def _ceil(binding: Binding) -> pb.BindingCeil:
    tier = tier_of_gate(binding.gate)
    node = binding.gate if tier is None else None
    return pb.BindingCeil(tier=tier, node=node, share=binding.share, opens_in_s=binding.for_s)


def ceil_to_wire(ceil: CeilStats) -> worker_pb.CeilSpec:
    tier = tier_of_gate(ceil.gate)
    node = ceil.gate if tier is None else None
    return worker_pb.CeilSpec(tier=tier, node=node, share=ceil.share, used_s=ceil.used_s, binds=ceil.binds)


def _parties(parties: tuple[Party, ...]) -> Iterable[pb.Party]:
    named = [
        pb.Party(tier=party.payer.tier, node=party.payer.tenant, requests=party.requests, evictable=party.evictable)
        for party in parties[:MAX_PARTIES]
    ]
    rest: dict[str, pb.Party] = {}
    for party in parties[MAX_PARTIES:]:
        message = rest.setdefault(party.payer.tier, pb.Party(tier=party.payer.tier))
        message.requests += party.requests
        message.evictable += party.evictable
    return [*named, *rest.values()]
