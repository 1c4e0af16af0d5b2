"""What weights come to: the part of its band that each tenant gets in each tier while everybody who may use the band has work
waiting. Guarantees, ceilings and idle neighbours change what is got; this is what weights alone say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from fairlane.gateway.policy.model import Policy
from fairlane.scheduler.tenancy import TiersPolicy, WithinTier


def is_fair(policy: Policy) -> bool:
    """Whether anything is shared by weight."""
    within_bands = policy.tiers_policy is TiersPolicy.VIP and policy.within_tier is WithinTier.FAIR
    return policy.tiers_policy is TiersPolicy.FAIR or within_bands


def entitled_shares(policy: Policy) -> dict[tuple[str, str], float]:
    """By (node, tier): the node's part of the tier's band, in (0, 1]; the parts of a band sum to 1. Empty without fair shares.

    Nodes are tenants, and organisations that have keys and tiers of their own.
    """
    if not is_fair(policy):
        return {}
    found: dict[tuple[str, str], float] = {}
    for band in _bands(policy):
        trees = {tier: tree for tier in band if (tree := _users(policy, tier))}
        for tier, of_band in _parts({tier: policy.tiers[tier].tier.weight for tier in trees}).items():
            for organisation, of_tier in _parts({name: policy.nodes[name].weight for name in trees[tier]}).items():
                for node, of_organisation in _parts(trees[tier][organisation]).items():
                    found[node, tier] = of_band * of_tier * of_organisation
    return found


def _bands(policy: Policy) -> Iterable[list[str]]:
    bands: dict[int, list[str]] = defaultdict(list)
    for name, entry in policy.tiers.items():
        bands[0 if policy.tiers_policy is TiersPolicy.FAIR else entry.tier.priority].append(name)
    return bands.values()


def _users(policy: Policy, tier: str) -> dict[str, dict[str, float]]:
    """By organisation: the weights of those in it that may use the tier."""
    callers = {principal.node for principal in policy.principals.values()}
    users: dict[str, dict[str, float]] = defaultdict(dict)
    for path, node in policy.nodes.items():
        if tier not in node.tiers:
            continue
        if node.is_tenant:
            users[path.partition("/")[0]][path] = node.weight
        elif path in callers:
            users[path][path] = 1.0  # an organisation's own requests are one more child, which has no weight to give
    return users


def _parts(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
