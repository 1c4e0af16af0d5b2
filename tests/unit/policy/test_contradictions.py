"""Places of a policy file that do not fit each other: what is an error, what only a warning, and that both places are named.
Sums and minima are worked out by hand beside each case."""

from __future__ import annotations

import datetime

import pytest

from fairlane.errors import ConfigError
from fairlane.gateway.policy.loader import load_policy_text

TODAY = datetime.date(2026, 6, 1)
HASH = "hmac-sha256:" + "a" * 64
WITHOUT_FAIR = "has no effect without fair shares: scheduler.within_tier fair, or scheduler.tiers fair"


def policy_text(scheduler: str = "{}", tiers: str = "t: {priority: 1}", organisation: str = "", **tenants: str) -> str:
    lines = ["version: 1", f"scheduler: {scheduler}", "tiers:", *(f"  {tier}" for tier in tiers.split("\n")), "organisations:"]
    lines += ["  o:", *([f"    {organisation}"] if organisation else []), "    tenants:"]
    lines += [f"      {name}: {{tiers: [t], {keys}}}" for name, keys in tenants.items()]
    return "\n".join(lines) + "\n"


def findings(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_policy_text(text.encode(), "p", TODAY)
    return [line.split(": ", 1)[1] for line in caught.value.findings]


def warnings(text: str) -> list[str]:
    return [line.split(": ", 1)[1] for line in load_policy_text(text.encode(), "p", TODAY).warnings]


T = "organisations.o.tenants"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            policy_text(tiers="t: {priority: 1, min: 30%, ceil: 20%}", a=""),
            "tiers.t.min: 30% is above the ceil, 20% at 4:30",
        ),
        (policy_text(a="min: 30%, ceil: 20%"), f"{T}.a.min: 30% is above the ceil, 20% at 8:33"),
        (
            policy_text(organisation="ceil: 20%", a="min: 30%"),
            f"{T}.a.min: 30% is above its organisation's ceil, 20% at 7:5",
        ),
        (
            policy_text(organisation="ceil: 40%", a="min: 30%", b="min: 20%"),  # 30 + 20 > 40, either by itself is not
            f"{T}: its tenants' min sum to 50%: at most 40%, its ceil at 7:5, is allowed (o/a 30% at 9:23, o/b 20% at 10:23)",
        ),
        (
            policy_text(tiers="t: {priority: 1, ceil: 20%}", a="min: 30%"),
            f"{T}.a.min: 30% is above what its tiers' ceil allow together (t 20% at 4:20)",
        ),
        (
            policy_text("{tiers: fair, preempt_gap_ms: 50, locality_window_ms: 50}", a=""),
            "scheduler.locality_window_ms: 50 is not below preempt_gap_ms, 50 at 2:26: whom it lets in could be evicted at once",
        ),
        (
            policy_text(organisation="min: 40%", a="min: 30%", b="min: 20%"),  # 30 + 20 > 40
            f"{T}: its tenants' min sum to 50%: at most 40%, its own min at 7:5 is allowed (o/a 30% at 9:23, o/b 20% at 10:23)",
        ),
        (
            policy_text(a="min: 60%", b="min: 50%"),
            "organisations: their min sum to 110%: at most 100% is allowed (o/a 60% at 8:23, o/b 50% at 9:23)",
        ),
        (
            policy_text(organisation="kv_guarantee: 40%", a="kv_guarantee: 30%", b="kv_guarantee: 20%"),
            f"{T}: its tenants' kv_guarantee sum to 50%: at most 40%, its own at 7:5 is allowed "
            "(o/a 30% at 9:23, o/b 20% at 10:23)",
        ),
        (
            policy_text(organisation="kv_guarantee: 4k", a="kv_guarantee: 3k", b="kv_guarantee: 2000"),
            f"{T}: its tenants' kv_guarantee sum to 5000 tokens: at most 4000, its own at 7:5, is allowed "
            "(o/a 3000 at 9:23, o/b 2000 at 10:23)",
        ),
        (policy_text(a="kv_guarantee: 30%, kv_limit: 20%"), f"{T}.a.kv_guarantee: 30% is above the kv_limit, 20% at 8:42"),
        (
            policy_text(organisation="kv_limit: 1k", a="kv_guarantee: 2k"),
            f"{T}.a.kv_guarantee: 2000 tokens is above its organisation's kv_limit, 1000 tokens at 7:5",
        ),
        (
            policy_text(organisation="kv_limit: 40%", a="kv_guarantee: 30%", b="kv_guarantee: 20%"),
            f"{T}: its tenants' kv_guarantee sum to 50%: at most its kv_limit, 40% at 7:5, is allowed "
            "(o/a 30% at 9:23, o/b 20% at 10:23)",
        ),
        (
            policy_text(a="requests_per_minute: 6, burst: 5s"),  # 6 * 5 / 60 = 0.5
            f"{T}.a.burst: allows 0.5 requests at once: at least 1 is needed, or none is ever admitted",
        ),
        (
            policy_text(a=f'keys: [{{id: k, hash: "{HASH}"}}]', organisation=f'keys: [{{id: k2, hash: "{HASH[:-1]}b"}}]'),
            "organisations.o.keys[0]: could send nothing: give o tiers of its own, or the key may_act_for: children",
        ),
        (policy_text().replace("    tenants:\n", "    weight: 1\n"), "organisations.o: has no tenants and no tiers of its own"),
        (policy_text(a="").replace("tiers: [t], ", ""), f"{T}.a.tiers: is missing: at least one of t is needed, here or in"),
        (policy_text(a="models: []"), f"{T}.a.models: is empty: leave it out to allow every model"),
        (
            policy_text(a="models: [y]") + "models: {x: {aliases: [y]}}\n",
            f"{T}.a.models[0]: y is an alias: say x (9:10)",
        ),
        (
            policy_text(organisation="models: [x]", a="models: [y]") + "models: {x: {}, y: {}}\n",
            f"{T}.a.models[0]: its organisation may not use y (7:5)",
        ),
        (
            policy_text(organisation='cache_domain: "group:g"', a="") + "groups: {g: {members: []}}\n",
            "organisations.o.cache_domain: o/a is not a member of the group g: add it at 10:14",
        ),
    ],
)
def test_a_contradiction_is_one_error_that_names_both_places(text: str, line: str) -> None:
    found = findings(text)
    assert (len(found), found[0][: len(line)]) == (1, line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            policy_text(organisation="max_in_flight: 5", a="max_in_flight: 6"),
            f"{T}.a.max_in_flight: 6 cannot be reached: o has 5 at 7:5",
        ),
        (
            policy_text(organisation="max_running: 5", a="members: {max_running: 6}"),
            f"{T}.a.members.max_running: 6 cannot be reached: o has 5 at 7:5",
        ),
        (
            policy_text(a="max_wait: 5s, members: {max_wait: 2m}"),
            f"{T}.a.members.max_wait: 2m cannot be reached: o/a has 5s at 8:23",
        ),
        (
            policy_text(organisation="kv_limit: 20%", a="kv_limit: 30%"),
            f"{T}.a.kv_limit: 30% cannot be reached: o has 20% at 7:5",
        ),
        (policy_text(a="weight: 2", b=""), f"{T}.a.weight: {WITHOUT_FAIR}"),
        (
            policy_text(a="cache_domain: public, kv_limit: 30%"),
            f"{T}.a.kv_limit: has no effect: its blocks count for its cache_domain, public",
        ),
        (policy_text(a="members: {kv_limit: 30%}"), f"{T}.a.members.kv_limit: has no effect without cache_domain member"),
        (policy_text("{within_tier: fair}", a="weight: 2"), f"{T}.a.weight: has no effect: o/a has no sibling to share with"),
        (
            policy_text("{within_tier: fair}", "t: {priority: 1, weight: 2}\nu: {priority: 2}", a=""),
            "tiers.t.weight: has no effect: no other tier has its priority, 1",
        ),
        (policy_text("{preempt_gap_ms: 5}", a=""), f"scheduler.preempt_gap_ms: {WITHOUT_FAIR}"),
        (policy_text("{locality_window_ms: 5}", a=""), f"scheduler.locality_window_ms: {WITHOUT_FAIR}"),
        (
            policy_text("{tiers: fcfs, within_tier: fair}", a=""),
            "scheduler.within_tier: has no effect with scheduler.tiers fcfs",
        ),
        (policy_text("{tiers: fcfs}", a="min: 5%"), f"{T}.a.min: has no effect with scheduler.tiers fcfs"),
        (
            policy_text("{tiers: fair}", "t: {priority: 1, patience: 5s}", a=""),
            "tiers.t.patience: has no effect with scheduler.tiers fair",
        ),
        (
            policy_text(tiers="t: {priority: 1, tpot_target: 50ms}", a=""),
            "tiers.t.tpot_target: has no effect without scheduler.within_tenant deadline or shaping",
        ),
        (
            policy_text("{tiers: fair}", "t: {priority: 1, tpot_target: 50ms, ttft_target: 1s}", a=""),
            "tiers.t.tpot_target: has no effect without scheduler.within_tenant deadline",
        ),
        (
            policy_text("{tiers: fcfs}", "t: {priority: 1, ttft_target: 50ms}", a=""),
            "tiers.t.ttft_target: has no effect without scheduler.within_tenant deadline",
        ),
        (
            policy_text("{plugin: mine, within_tenant: deadline}", a="weight: 2", b=""),
            "scheduler.within_tenant: has no effect with scheduler.plugin",
        ),
        (policy_text(a="burst: 5s"), f"{T}.a.burst: has no effect without requests_per_minute or tokens_per_minute"),
        (
            policy_text(a="cache_domain: member"),
            f"{T}.a.cache_domain: has no effect: o/a has no members: a tenant has them once it has the key `members`",
        ),
        (
            policy_text(a=f'keys: [{{id: k, hash: "{HASH}", may_act_for: children}}]'),
            f"{T}.a.keys[0].may_act_for: has no effect: o/a has no members: a tenant has them once it has the key `members`",
        ),
    ],
)
def test_what_can_have_no_effect_is_one_warning(text: str, line: str) -> None:
    assert warnings(text) == [line]


@pytest.mark.parametrize(
    "text",
    [
        policy_text("{tiers: fair, preempt_gap_ms: 5}", "t: {priority: 1, weight: 2}\nu: {priority: 2}", a="weight: 2", b=""),
        policy_text("{within_tier: fair}", "t: {priority: 1, weight: 2}\nu: {priority: 1}", a="min: 5%", b="weight: 3"),
        policy_text(organisation="kv_guarantee: 40%", a="kv_guarantee: 30%", b="kv_guarantee: 10%"),  # exactly all of it
        policy_text(organisation="kv_guarantee: 40%", a="kv_guarantee: 3k"),  # cannot be compared without the pool's size
        policy_text(tiers="t: {priority: 1, min: 20%, ceil: 20%}", a="min: 10%, ceil: 10%"),
        policy_text(organisation="ceil: 50%", a="min: 30%", b="min: 20%"),
        policy_text(a="tokens_per_minute: 1k", tiers="t: {priority: 1, max_output_tokens: 1000}"),  # fits exactly
        policy_text(a="tokens_per_minute: 1k, max_output_tokens: 1k", tiers="t: {priority: 1, max_output_tokens: 9k}"),
        policy_text(organisation="tiers: [t]", a="").replace("tiers: [t], }", "}"),
        policy_text(organisation='cache_domain: "group:g"', a="") + "groups: {g: {members: [o]}}\n",
        policy_text(a="members: {}, cache_domain: member"),
    ],
)
def test_what_fits_is_neither(text: str) -> None:
    assert warnings(text) == []
