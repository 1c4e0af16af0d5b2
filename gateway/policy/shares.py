"""Numbers in the policy file that must fit each other: shares and guarantees that are promised twice, limits that contradict,
children above their parents. Every finding names both places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fairlane.config.fields import Amount
from fairlane.config.scalars import written
from fairlane.config.source import Where
from fairlane.config.strict import Located
from fairlane.gateway.policy.checks import Entry, Found, entries, limited, tenants_of
from fairlane.gateway.policy.schema import LimitsPart, NodePart, OrganisationPart, PolicyFile

# Sums of percentages are not exact in binary.
_SLACK = 1e-9
_DEFAULT_BURST_S = 60.0
# A child's may not be above its parent's: the parent's binds first.
_CAPS = ("max_in_flight", "max_running", "max_queue", "max_wait", "max_output_tokens", "max_duration")
_RATES = ("requests_per_minute", "tokens_per_minute")
_DURATIONS = frozenset({"max_wait", "max_duration"})
_FRACTIONS = frozenset({"ceil", "min"})


def errors(located: Located[PolicyFile]) -> list[Found]:
    return [
        *_tier_minimums(located),
        *_node_minimums(located),
        *_above_ceiling(located),
        *_together_above_ceiling(located),
        *_guarantees(located),
        *_above_limit(located),
        *_promised_above_limit(located),
        *_bursts(located),
        *_budgets(located),
        *_window(located),
    ]


def warnings(located: Located[PolicyFile]) -> list[Found]:
    """Limits that their parents' make unreachable."""
    return list(_above_parent(located))


# -- min and ceil --------------------------------------------------------------------------------------------------------


def _tier_minimums(located: Located[PolicyFile]) -> Iterator[Found]:
    promised = [(name, tier.min, ("tiers", name, "min")) for name, tier in located.value.tiers.items() if tier.min]
    yield from _too_much(located, ("tiers",), "the tiers' min sum", promised, 1.0, "100%")


def _node_minimums(located: Located[PolicyFile]) -> Iterator[Found]:
    top = []
    for organisation, below in _organisations(located.value):
        own = organisation.part.min
        promised = [(child.path, child.part.min, (*child.where, "min")) for child in below if child.part.min]
        if own:
            limit = f"{_percent(own)}, its own min at {located.mark(*organisation.where, 'min')}"
            yield from _too_much(located, (*organisation.where, "tenants"), "its tenants' min sum", promised, own, limit)
        top += [(organisation.path, own, (*organisation.where, "min"))] if own else promised
    yield from _too_much(located, ("organisations",), "their min sum", top, 1.0, "100%")


def _too_much(
    located: Located[PolicyFile], where: Where, what: str, promised: Sequence[tuple[str, float, Where]], most: float, limit: str
) -> Iterator[Found]:
    total = sum(share for _, share, _ in promised)
    if total > most + _SLACK:
        places = ", ".join(f"{name} {_percent(share)} at {located.mark(*place)}" for name, share, place in promised)
        yield where, f"{what} to {_percent(total)}: at most {limit} is allowed ({places})"


def _organisations(file: PolicyFile) -> Iterator[tuple[Entry, list[Entry]]]:
    for entry in entries(file):
        if isinstance(entry.part, OrganisationPart):
            yield entry, tenants_of(entry, entry.part)


def _percent(share: float) -> str:
    return f"{share * 100:.4g}%"


def _above_ceiling(located: Located[PolicyFile]) -> Iterator[Found]:
    pairs: list[tuple[Where, float, Where, float | None]] = [
        (("tiers", name), tier.min, ("tiers", name), tier.ceil) for name, tier in located.value.tiers.items()
    ]
    for entry in entries(located.value):
        pairs.append((entry.where, entry.part.min, entry.where, entry.part.ceil))
        if entry.above is not None:
            pairs.append((entry.where, entry.part.min, entry.above.where, entry.above.part.ceil))
    for where, minimum, ceiling_at, ceiling in pairs:
        if ceiling is not None and minimum > ceiling:
            whose = "the ceil" if where == ceiling_at else "its organisation's ceil"
            place = located.mark(*ceiling_at, "ceil")
            yield (*where, "min"), f"{_percent(minimum)} is above {whose}, {_percent(ceiling)} at {place}"


def _together_above_ceiling(located: Located[PolicyFile]) -> Iterator[Found]:
    """What fits one by one: what tenants are promised together, and what a node is promised whose tiers all have a ceil."""
    for organisation, below in _organisations(located.value):
        ceiling = organisation.part.ceil
        promised = [(child.path, child.part.min, (*child.where, "min")) for child in below if child.part.min]
        if ceiling is not None and not organisation.part.min and all(share <= ceiling for _, share, _ in promised):
            limit = f"{_percent(ceiling)}, its ceil at {located.mark(*organisation.where, 'ceil')},"
            yield from _too_much(located, (*organisation.where, "tenants"), "its tenants' min sum", promised, ceiling, limit)
    tiers = located.value.tiers
    for entry in entries(located.value):
        ceilings = {name: tiers[name].ceil for name in entry.tiers if name in tiers}
        most = sum(1.0 if ceiling is None else ceiling for ceiling in ceilings.values())
        if ceilings and entry.part.min > most + _SLACK:
            places = ", ".join(
                f"{name} {_percent(ceiling)} at {located.mark('tiers', name, 'ceil')}"
                for name, ceiling in ceilings.items()
                if ceiling is not None
            )
            yield (*entry.where, "min"), f"{_percent(entry.part.min)} is above what its tiers' ceil allow together ({places})"


def _window(located: Located[PolicyFile]) -> Iterator[Found]:
    scheduler = located.value.scheduler
    window, gap = scheduler.locality_window_ms, scheduler.preempt_gap_ms
    if gap is not None and window and window >= gap:
        place = located.mark("scheduler", "preempt_gap_ms")
        message = f"{window:g} is not below preempt_gap_ms, {gap:g} at {place}: whom it lets in could be evicted at once"
        yield ("scheduler", "locality_window_ms"), message


# -- KV cache --------------------------------------------------------------------------------------------------------------


def _guarantees(located: Located[PolicyFile]) -> Iterator[Found]:
    """Shares of the pool and numbers of tokens are compared with their like only: the size of a pool is not known here."""
    top: list[tuple[str, float, Where]] = [
        (f"group {name}", part.kv_guarantee.share, ("groups", name, "kv_guarantee"))
        for name, part in located.value.groups.items()
        if part.kv_guarantee is not None and part.kv_guarantee.share
    ]
    for organisation, below in _organisations(located.value):
        own = organisation.part.kv_guarantee
        where = (*organisation.where, "kv_guarantee")
        promised = [(c.path, c.part.kv_guarantee, (*c.where, "kv_guarantee")) for c in below if c.part.kv_guarantee is not None]
        shares = [(path, amount.share, place) for path, amount, place in promised if amount.share is not None]
        tokens = [(path, amount.count, place) for path, amount, place in promised if amount.count is not None]
        if own is not None and own.share is not None:
            limit = f"{_percent(own.share)}, its own at {located.mark(*where)}"
            yield from _too_much(
                located, (*organisation.where, "tenants"), "its tenants' kv_guarantee sum", shares, own.share, limit
            )
            top.append((organisation.path, own.share, where))
        elif own is None:
            top += shares
        if own is not None and own.count is not None and sum(count for _, count, _ in tokens) > own.count:
            places = ", ".join(f"{path} {count} at {located.mark(*place)}" for path, count, place in tokens)
            total = sum(count for _, count, _ in tokens)
            message = f"its tenants' kv_guarantee sum to {total} tokens: at most {own.count}, its own at {located.mark(*where)}"
            yield (*organisation.where, "tenants"), f"{message}, is allowed ({places})"
    yield from _too_much(located, ("organisations",), "their kv_guarantee sum", top, 1.0, "100%")


def _promised_above_limit(located: Located[PolicyFile]) -> Iterator[Found]:
    """What tenants are promised together must fit under what their organisation may have."""
    for organisation, below in _organisations(located.value):
        limit = organisation.part.kv_limit
        promised = [(c.path, c.part.kv_guarantee, (*c.where, "kv_guarantee")) for c in below if c.part.kv_guarantee is not None]
        if limit is None or any(_exceeds(amount, limit) for _, amount, _ in promised):  # that one is told by itself
            continue
        place = located.mark(*organisation.where, "kv_limit")
        of_kind = [(path, amount, where) for path, amount, where in promised if (amount.share is None) is (limit.share is None)]
        total = Amount(sum(a.share or 0.0 for _, a, _ in of_kind), sum(a.count or 0 for _, a, _ in of_kind))
        total = Amount(share=total.share) if limit.share is not None else Amount(count=total.count)
        if _exceeds(total, limit):
            places = ", ".join(f"{path} {_amount(amount)} at {located.mark(*where)}" for path, amount, where in of_kind)
            message = f"its tenants' kv_guarantee sum to {_amount(total)}: at most its kv_limit, {_amount(limit)} at {place}"
            yield (*organisation.where, "tenants"), f"{message}, is allowed ({places})"


def _above_limit(located: Located[PolicyFile]) -> Iterator[Found]:
    pairs: list[tuple[Where, Amount | None, Where, Amount | None]] = [
        (("groups", name), part.kv_guarantee, ("groups", name), part.kv_limit) for name, part in located.value.groups.items()
    ]
    for entry in entries(located.value):
        pairs.append((entry.where, entry.part.kv_guarantee, entry.where, entry.part.kv_limit))
        if entry.above is not None:
            pairs.append((entry.where, entry.part.kv_guarantee, entry.above.where, entry.above.part.kv_limit))
    for where, guarantee, limit_at, limit in pairs:
        if _exceeds(guarantee, limit):
            whose = "the kv_limit" if where == limit_at else "its organisation's kv_limit"
            place = located.mark(*limit_at, "kv_limit")
            yield (*where, "kv_guarantee"), f"{_amount(guarantee)} is above {whose}, {_amount(limit)} at {place}"


def _exceeds(amount: Amount | None, other: Amount | None) -> bool:
    if amount is None or other is None:
        return False
    if amount.share is not None and other.share is not None:
        return amount.share > other.share + _SLACK
    return amount.count is not None and other.count is not None and amount.count > other.count


def _amount(amount: Amount | None) -> str:
    if amount is None:
        return "none"
    return _percent(amount.share) if amount.share is not None else f"{amount.count} tokens"


# -- rates and budgets -----------------------------------------------------------------------------------------------------


def _bursts(located: Located[PolicyFile]) -> Iterator[Found]:
    for where, part, _, node in limited(located.value):
        burst_s = _DEFAULT_BURST_S if part.burst is None else part.burst
        if part.requests_per_minute is not None and part.requests_per_minute * burst_s < 60:
            at_once = part.requests_per_minute * burst_s / 60
            yield (*where, "burst"), f"allows {at_once:.3g} requests at once: at least 1 is needed, or none is ever admitted"
        if part.tokens_per_minute is None:
            continue
        largest, place = _largest_request(located, where, part, node)
        at_once = part.tokens_per_minute * burst_s / 60
        if largest > at_once:
            key = "burst" if part.burst is not None else "tokens_per_minute"
            message = f"allows {at_once:.6g} tokens at once: less than the largest request, whose max_output_tokens is {largest}"
            yield (*where, key), f"{message} at {place}; such a request could never be admitted"


def _largest_request(located: Located[PolicyFile], where: Where, part: LimitsPart, node: Entry) -> tuple[int, object]:
    """The most output tokens that a request may ask for here, and where that is said; 0 if nothing says it."""
    file = located.value
    owners: list[tuple[int, Where]] = [(part.max_output_tokens, where)] if part.max_output_tokens is not None else []
    owner: Entry | None = node
    while owner is not None:
        if owner.part.max_output_tokens is not None:
            owners.append((owner.part.max_output_tokens, owner.where))
        owner = owner.above
    if owners:
        most, at = min(owners, key=lambda item: item[0])
        return most, located.mark(*at, "max_output_tokens")
    stated: list[tuple[int, Where]] = []
    for name in node.tiers:
        tier = file.tiers.get(name)
        if tier is not None and tier.max_output_tokens is not None:
            stated.append((tier.max_output_tokens, ("tiers", name, "max_output_tokens")))
        elif file.defaults.max_output_tokens is not None:
            stated.append((file.defaults.max_output_tokens, ("defaults", "max_output_tokens")))
    if not stated:
        return 0, None
    most, at = max(stated, key=lambda item: item[0])
    return most, located.mark(*at)


def _budgets(located: Located[PolicyFile]) -> Iterator[Found]:
    for where, part, _, _ in limited(located.value):
        first: dict[object, int] = {}
        for index, budget in enumerate(part.budgets):
            if first.setdefault(budget.per, index) != index:
                place = located.mark(*where, "budgets", first[budget.per])
                yield (*where, "budgets", index, "per"), f"there is already a budget per {budget.per.value} at {place}"


# -- children and parents --------------------------------------------------------------------------------------------------


def _above_parent(located: Located[PolicyFile]) -> Iterator[Found]:
    for where, part, above, _ in limited(located.value):
        for key in (*_CAPS, *_RATES, "ceil", "kv_limit"):
            found = _bound_above(above, key)
            own = getattr(part, key, None)
            if found is None or own is None:
                continue
            limit, owner = found
            if _exceeds(own, limit) if isinstance(own, Amount) else own > limit:
                say = _say(key)
                place = located.mark(*owner.where, key)
                yield (*where, key), f"{say(own)} cannot be reached: {owner.path} has {say(limit)} at {place}"


def _bound_above(above: Entry | None, key: str) -> tuple[Any, Entry] | None:
    """The nearest ancestor's value of the key."""
    while above is not None:
        value = getattr(above.part, key)
        if value is not None:
            return value, above
        above = above.above
    return None


def _say(key: str) -> Callable[[Any], str]:
    if key in _DURATIONS:
        return lambda value: written(value, "duration")
    if key in _FRACTIONS:
        return _percent
    return _amount if key == "kv_limit" else str


def is_only_child(entry: Entry, file: PolicyFile) -> bool:
    """Whether the node has no sibling to share with."""
    if entry.above is None:
        return len(file.organisations) == 1
    part: NodePart = entry.above.part
    return isinstance(part, OrganisationPart) and len(part.tenants) == 1
