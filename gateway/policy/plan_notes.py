"""What a change of policy means to requests that run, wait or come, and which changes are risky. It says what admission, the
authenticator and the scheduler will do; it decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fairlane.gateway.policy.entitled import entitled_shares
from fairlane.gateway.policy.model import MemberTemplate, Node, Policy
from fairlane.scheduler.tenancy import TiersPolicy

# Guarantees that leave less than this to be ordered are worth a word.
_LEFT_TO_ORDER = 0.1
_REFUSED_WITH = {"max_in_flight": "MAX_IN_FLIGHT", "max_queue": "QUEUE_FULL", "max_members": "MAX_MEMBERS"}


@dataclass(frozen=True, slots=True)
class Note:
    """subject: whom it is about. risk: it may be a mistake. node, tier: whose requests in flight it is about; "": of any, and
    with both empty it is about none in particular."""

    subject: str
    message: str
    risk: bool = False
    node: str = ""
    tier: str = ""


def notes(old: Policy, new: Policy, moved: Mapping[str, str]) -> Iterator[Note]:
    """moved: new path to old path. The risks come first."""
    found = [*_keys(old, new, moved), *_reachable(old, new), *_guarantees(old, new), *_starving(old, new), *_order(old, new)]
    found += _tiers(old, new)
    shares = entitled_shares(old), entitled_shares(new)
    for path, node in new.nodes.items():
        was = old.nodes.get(moved.get(path, path))
        if was is not None:
            found += _node(was, node)
            found += _halved(was, node, *shares)
    found += _gone(old, new, moved)
    yield from (note for note in found if note.risk)
    yield from (note for note in found if not note.risk)


# -- keys and nodes --------------------------------------------------------------------------------------------------------


def _keys(old: Policy, new: Policy, moved: Mapping[str, str]) -> Iterator[Note]:
    now_at = {before: after for after, before in moved.items()}
    for digest, principal in old.principals.items():
        after = new.principals.get(digest)
        if after is None:
            message = "is refused at once (UNAUTHENTICATED); what its holder has in flight goes on"
            yield Note(f"key {principal.key_id}", message, risk=True, node=principal.node)
            continue
        if principal.may_act_for_children and not after.may_act_for_children:
            yield Note(f"key {principal.key_id}", "may not act for others any more: naming one is TENANT_MISMATCH", risk=True)
        if after.node != now_at.get(principal.node, principal.node):
            yield Note(f"key {principal.key_id}", f"stands for {after.node} from now on, not for {principal.node}", risk=True)


def _reachable(old: Policy, new: Policy) -> Iterator[Note]:
    before = set(old.nodes_without_keys())
    for path in new.nodes_without_keys():
        if path in old.nodes and path not in before:
            yield Note(
                path, "has no key left, and its organisation none that may act for it: only a demo key can call it", risk=True
            )


def _gone(old: Policy, new: Policy, moved: Mapping[str, str]) -> Iterator[Note]:
    kept = {before: after for after, before in moved.items()}
    for path, node in old.nodes.items():
        if path in kept:
            yield Note(kept[path], f"what is in flight stays under {path}, and counts there, until it ends", node=path)
        elif path not in new.nodes and node.is_tenant:
            yield Note(path, "its new requests are refused; what is admitted, running or waiting, goes on to its end", node=path)


# -- order -----------------------------------------------------------------------------------------------------------------


def _order(old: Policy, new: Policy) -> Iterator[Note]:
    before, after = old.snapshot(0), new.snapshot(0)
    is_same = (
        before.tiers_policy is after.tiers_policy
        and before.within_tier is after.within_tier
        and before.preempt_gap_ms == after.preempt_gap_ms
        and before.predict_output == after.predict_output
        and before.locality_window_ms == after.locality_window_ms
        and {tier.name: tier for tier in before.tiers} == {tier.name: tier for tier in after.tiers}
        and {share.path: share for share in before.nodes} == {share.path: share for share in after.nodes}
    )
    if not is_same:
        message = (
            "what waits is ordered anew from the next step on; running streams may lose their blocks to others, never tokens"
        )
        yield Note("scheduler", message)


def _guarantees(old: Policy, new: Policy) -> Iterator[Note]:
    """Above 100% the file has an error; little below it, guarantees decide nearly everything."""

    def left(policy: Policy) -> tuple[float, float]:
        return 1 - sum(e.tier.min_share for e in policy.tiers.values()), 1 - sum(_promised(policy))

    for what, was, now in zip(("tiers", "nodes"), left(old), left(new), strict=True):
        if now < was and now < _LEFT_TO_ORDER:
            message = f"their min sum to {(1 - now) * 100:.4g}%: {max(0.0, now) * 100:.4g}% of the worker is left to go by order"
            yield Note(what, message, risk=True)


def _promised(policy: Policy) -> Iterator[float]:
    """Of organisations, and of tenants whose organisation is promised nothing: its promise contains theirs."""
    for path, node in policy.nodes.items():
        organisation = policy.nodes[path.partition("/")[0]]
        if not node.is_tenant or not organisation.min_share:
            yield node.min_share


def _starving(old: Policy, new: Policy) -> Iterator[Note]:
    for name in new.tiers:
        if _can_starve(name, new) and not (name in old.tiers and _can_starve(name, old)):
            yield Note(f"tier {name}", "has neither min nor patience: higher tiers can starve it", risk=True, tier=name)


def _can_starve(name: str, policy: Policy) -> bool:
    tier = policy.tiers[name].tier
    is_lower = any(other.tier.priority > tier.priority for other in policy.tiers.values())
    return policy.tiers_policy is TiersPolicy.VIP and is_lower and not tier.min_share and tier.patience_s is None


def _halved(
    was: Node, now: Node, before: Mapping[tuple[str, str], float], after: Mapping[tuple[str, str], float]
) -> Iterator[Note]:
    for tier in now.tiers:
        old_share, new_share = before.get((was.path, tier)), after.get((now.path, tier))
        if old_share is not None and new_share is not None and new_share < old_share / 2:
            message = f"its share in {tier} falls by more than half, from {old_share * 100:.4g}% to {new_share * 100:.4g}%"
            yield Note(now.path, message, risk=True, node=was.path, tier=tier)


# -- tiers -----------------------------------------------------------------------------------------------------------------


def _tiers(old: Policy, new: Policy) -> Iterator[Note]:
    for name, entry in old.tiers.items():
        after = new.tiers.get(name)
        if after is None:
            message = "new requests for it get TIER_UNKNOWN; what is admitted keeps its order and loses the tier's min"
            yield Note(f"tier {name}", message, tier=name)
            continue
        if _lowered(entry.max_queue, after.max_queue):
            yield _cap(f"tier {name}", "max_queue", after.max_queue, tier=name)
        if _lowered(entry.tier.ceil, after.tier.ceil):
            yield _cap(f"tier {name}", "ceil", after.tier.ceil, tier=name)
    limits = [_limits(policy) for policy in (old, new)]
    if any(limits[0][who] != limits[1][who] for who in limits[0].keys() & limits[1].keys()):
        keys = "max_wait, max_output_tokens and max_duration"
        yield Note("limits of a request", f"new {keys} hold for requests that come; those in flight keep theirs")


def _limits(policy: Policy) -> dict[tuple[str, str, bool], object]:
    """What binds single requests, by node and tier, of the node's own and of its members'."""
    found: dict[tuple[str, str, bool], object] = {}
    for path, node in policy.nodes.items():
        for tier in node.tiers:
            bounds = policy.effective(path, tier)
            found[path, tier, False] = (bounds.max_wait_s, bounds.max_output_tokens, bounds.max_duration_s)
            if node.members is not None:
                bounds = policy.effective(f"{path}/member", tier)
                found[path, tier, True] = (bounds.max_wait_s, bounds.max_output_tokens, bounds.max_duration_s)
    return found


# -- one node --------------------------------------------------------------------------------------------------------------


def _node(was: Node, now: Node) -> Iterator[Note]:
    yield from _allowed(was, now)
    for key in ("max_running", "max_in_flight", "max_queue"):
        limit = getattr(now, key)
        if _lowered(getattr(was, key), limit):
            yield _cap(now.path, key, limit, node=was.path)
    if _lowered(was.ceil, now.ceil):
        yield _cap(now.path, "ceil", now.ceil, node=was.path)
    yield from _kv_quotas(was, now)
    if was.members is not None:
        yield from _members(was, was.members, now)
    if now.cache_domain != was.cache_domain:
        message = f"prefixes cached until now are not found in {now.cache_domain}: those prompts are computed again"
        yield Note(now.path, message)
    if now.models is not None and (was.models is None or set(was.models) - set(now.models)):
        yield Note(now.path, f"new requests for other models than {', '.join(now.models)} get MODEL_NOT_FOUND")


def _kv_quotas(was: Node, now: Node) -> Iterator[Note]:
    if now.kv_limit is not None and now.kv_limit != was.kv_limit:
        message = f"kv_limit {now.kv_limit}: streams above it lose their blocks at once and go on later"
        yield Note(now.path, f"{message}; requests that could never fit end with KV_CAPACITY_EXCEEDED", node=was.path)
    if now.kv_guarantee is not None and now.kv_guarantee != was.kv_guarantee:
        message = f"kv_guarantee {now.kv_guarantee}: below it, it takes blocks back from whoever has borrowed"
        yield Note(now.path, f"{message}, whatever their tier")


def _allowed(was: Node, now: Node) -> Iterator[Note]:
    lost = [tier for tier in was.tiers if tier not in now.tiers]
    if was.tiers and len(lost) == len(was.tiers):
        left = f"has {', '.join(now.tiers)} instead" if now.tiers else "can send no requests"
        message = f"loses every tier it had ({', '.join(lost)}) and {left}: requests that name one of those are refused"
        yield Note(now.path, message, risk=True, node=was.path)
    else:
        for tier in lost:
            message = f"may not use {tier} any more: new requests for it are refused, admitted ones go on in it"
            yield Note(now.path, message, node=was.path, tier=tier)
        if was.tiers and now.tiers and was.tiers[0] != now.tiers[0]:
            message = f"its requests that name no tier run in {now.tiers[0]} instead of {was.tiers[0]}"
            yield Note(now.path, message, risk=True)


def _members(was: Node, template: MemberTemplate, now: Node) -> Iterator[Note]:
    who = f"{now.path}/*"
    if now.members is None:
        yield Note(who, "it has no members any more: naming one is TENANT_MISMATCH; what is in flight goes on", risk=True)
        return
    for key in ("max_running", "max_in_flight", "max_queue", "max_members"):
        limit = getattr(now.members, key)
        if _lowered(getattr(template, key), limit):
            yield _cap(who, key, limit, node=was.path)


def _cap(subject: str, key: str, limit: object, *, node: str = "", tier: str = "") -> Note:
    if key == "max_running":
        message = f"nobody is stopped: above {limit} running, what waits starts only as others end"
    elif key == "ceil" and isinstance(limit, float):
        share = f"{limit * 100:.4g}%"
        message = f"nothing ends: above {share} of the worker's time streams pause and what waits stays, even if the rest idles"
    elif key == "max_members":
        message = f"members known by then stay: above {limit}, new ones are refused ({_REFUSED_WITH[key]})"
    else:
        state = "in flight" if key == "max_in_flight" else "waiting"
        message = f"nothing ends: new requests are refused ({_REFUSED_WITH[key]}) until fewer than {limit} are {state}"
    return Note(subject, f"lower {key}: {message}", node=node, tier=tier)


def _lowered(was: float | None, now: float | None) -> bool:
    return now is not None and (was is None or now < was)
