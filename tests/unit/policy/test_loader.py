"""From a policy file to a Policy: what each key becomes, and every mistake that needs two places of the file to see."""

from __future__ import annotations

import datetime
import hashlib
import re
from pathlib import Path

import pytest

from fairlane.errors import ConfigError
from fairlane.gateway.policy.loader import load_policy_file, load_policy_text
from fairlane.gateway.policy.model import Node, Principal, TierPolicy
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

ROOT = Path(__file__).parents[3]
TODAY = datetime.date(2026, 6, 1)
HASH = "hmac-sha256:" + "a" * 64
OTHER = "hmac-sha256:" + "b" * 64

GOOD = f"""
version: 1
scheduler: {{tiers: vip}}
tiers:
  gold: {{priority: 100, shaping: balanced, max_output_tokens: 2k, max_duration: 5m}}
  batch: {{priority: 10, min: 5%, patience: 10m}}
organisations:
  acme:
    tenants:
      shop: {{tiers: [gold, batch], keys: [{{id: k1, hash: "{HASH}", not_after: 2027-01-31}}], max_in_flight: 8}}
      no: {{tiers: [batch], cache_domain: "group:docs"}}
      open: {{tiers: [batch], cache_domain: public}}
groups: {{docs: {{members: [acme/no]}}}}
models: {{small: {{aliases: [gpt-4o-mini]}}}}
"""


def findings(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_policy_text(text.encode(), "p", TODAY)
    return list(caught.value.findings)


def test_every_key_becomes_a_fact() -> None:
    policy = load_policy_text(GOOD.encode(), "p", TODAY)
    assert (policy.tiers, policy.nodes, policy.principals, policy.aliases, policy.warnings) == (
        {
            "gold": TierPolicy(Tier("gold", 100, shaping=Shaping.BALANCED), 2000, 300.0),
            "batch": TierPolicy(Tier("batch", 10, min_share=0.05, patience_s=600.0)),
        },
        {
            "acme": Node("acme", (), "tenant:acme"),
            "acme/shop": Node("acme/shop", ("gold", "batch"), "tenant:acme/shop", 8),
            "acme/no": Node("acme/no", ("batch",), "group:docs"),
            "acme/open": Node("acme/open", ("batch",), "public"),
        },
        {HASH: Principal("k1", "acme/shop", datetime.date(2027, 1, 31))},
        {"gpt-4o-mini": "small"},
        (),
    )


def test_the_hash_is_of_the_files_bytes_and_the_text_is_kept() -> None:
    policy = load_policy_text(GOOD.encode(), "p", TODAY)
    assert (policy.sha256, policy.text, policy.path) == (hashlib.sha256(GOOD.encode()).hexdigest(), GOOD, "p")


def test_the_snapshot_is_what_the_engine_needs() -> None:
    policy = load_policy_text(GOOD.encode(), "p", TODAY)
    tiers = (policy.tiers["gold"].tier, policy.tiers["batch"].tier)
    own = (NodeShare("acme"), NodeShare("acme/shop"))
    nodes = (*own, NodeShare("acme/no", shared_domain="group:docs"), NodeShare("acme/open", shared_domain="public"))
    assert policy.snapshot(7) == PolicySnapshot(7, policy.sha256, TiersPolicy.VIP, tiers, WithinTier.FCFS, nodes, None)


def test_the_snapshot_carries_kv_quotas_of_nodes_members_and_groups() -> None:
    text = """
version: 1
tiers: {one: {priority: 1}}
groups: {g: {members: [a/y], kv_limit: 40%}, h: {members: [a]}}
organisations:
  a:
    kv_guarantee: 30%
    tenants:
      x: {tiers: [one], kv_guarantee: 10k, kv_limit: 80%, cache_domain: member, members: {kv_limit: 5%}}
      y: {tiers: [one], cache_domain: "group:g"}
"""
    snapshot = load_policy_text(text.encode(), "p", TODAY).snapshot(1)
    thousands, limit, member = KVAmount(tokens=10_000), KVAmount(share=0.8), KVAmount(share=0.05)
    assert (snapshot.nodes, snapshot.groups) == (
        (
            NodeShare("a", kv_guarantee=KVAmount(share=0.3)),
            NodeShare("a/x", kv_guarantee=thousands, kv_limit=limit, member_kv_limit=member),
            NodeShare("a/y", shared_domain="group:g"),
        ),
        (GroupShare("g", kv_limit=KVAmount(share=0.4)),),
    )


@pytest.mark.parametrize(
    ("node", "limits"),
    [
        ("a", (KVAmount(share=0.9),)),
        ("a/x", (KVAmount(tokens=100), KVAmount(share=0.9))),
        ("a/x/m", (KVAmount(share=0.05), KVAmount(tokens=100), KVAmount(share=0.9))),
        ("a/y", (KVAmount(share=0.4),)),
    ],
)
def test_every_limit_above_a_request_binds_it_and_a_groups_in_their_place(node: str, limits: tuple[KVAmount, ...]) -> None:
    text = """
version: 1
tiers: {one: {priority: 1}}
groups: {g: {members: [a/y], kv_limit: 40%}}
organisations:
  a:
    tiers: [one]
    kv_limit: 90%
    tenants:
      x: {kv_limit: 100, cache_domain: member, members: {kv_limit: 5%}}
      y: {cache_domain: "group:g"}
"""
    assert load_policy_text(text.encode(), "p", TODAY).effective(node, "one").kv_limits == limits


def test_the_snapshot_carries_shares_caps_and_templates() -> None:
    text = """
version: 1
scheduler: {tiers: fair, preempt_gap_ms: 50, locality_window_ms: 20, cost: drf, within_tenant: deadline}
tiers: {one: {priority: 1, weight: 2}, two: {priority: 1}}
organisations:
  a: {weight: 2, min: 20%, max_running: 9, tenants: {x: {tiers: [one], members: {weight: 3, max_running: 2}}}}
  b: {tenants: {y: {tiers: [two]}}}
"""
    snapshot = load_policy_text(text.encode(), "p", TODAY).snapshot(1)
    assert (snapshot.cost, snapshot.within_tenant, snapshot.plugin) == (CostName.DRF, WithinTenant.DEADLINE, "")
    assert snapshot.locality_window_ms == 20.0
    assert (snapshot.tiers_policy, snapshot.preempt_gap_ms, [tier.weight for tier in snapshot.tiers], snapshot.nodes) == (
        TiersPolicy.FAIR,
        50.0,
        [2.0, 1.0],
        (
            NodeShare("a", 2.0, 0.2, 9),
            NodeShare("a/x", member_weight=3.0, member_max_running=2),
            NodeShare("b"),
            NodeShare("b/y"),
        ),
    )


def test_the_snapshot_carries_targets_and_a_plugin() -> None:
    text = """
version: 1
scheduler: {plugin: mine}
tiers: {one: {priority: 1, ttft_target: 300ms, tpot_target: 50ms, shaping: {prefill_share: 80%, max_step: 40ms}}}
organisations: {a: {tiers: [one]}}
"""
    snapshot = load_policy_text(text.encode(), "p", TODAY).snapshot(1)
    tier = Tier("one", 1, shaping=ShapingRule(0.8, True, 0.04), ttft_target_s=0.3, tpot_target_s=0.05)
    assert (snapshot.plugin, snapshot.tiers) == ("mine", (tier,))


def test_extra_principals_join_but_never_replace_the_files_own() -> None:
    policy = load_policy_text(GOOD.encode(), "p", TODAY)
    extra = {OTHER: Principal("demo", "acme/open", loopback_only=True), HASH: Principal("demo2", "acme/open")}
    assert {key: value.key_id for key, value in policy.with_principals(extra).principals.items()} == {HASH: "k1", OTHER: "demo"}


def test_extra_principals_of_unknown_nodes_are_refused() -> None:
    policy = load_policy_text(GOOD.encode(), "p", TODAY)
    with pytest.raises(ValueError, match="acme/nobody"):
        policy.with_principals({OTHER: Principal("demo", "acme/nobody")})


def test_nodes_without_keys_are_known() -> None:
    assert load_policy_text(GOOD.encode(), "p", TODAY).nodes_without_keys() == ("acme/no", "acme/open")


def test_the_shipped_policy_is_right_and_says_nothing() -> None:
    policy = load_policy_file(ROOT / "configs" / "tenants.yaml", TODAY)
    assert (list(policy.tiers), list(policy.nodes), policy.warnings) == (
        ["gold", "standard", "batch"],
        ["northwind", "northwind/checkout", "northwind/docs-api", "chatly", "chatly/paid", "chatly/free"],
        (),
    )


UNFAIR = "has no effect without fair shares: scheduler.within_tier fair, or scheduler.tiers fair"


# In the lines expected below, @word@ stands for the place (line:column) of that word in the file, @word#2@ for its second.
T = "organisations.acme.tenants"
TWO_KEYS = f'open: {{keys: [{{id: k2, hash: "{OTHER}"}}], '


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("[gold, batch]", "[gold, bacth]", f'@bacth@: {T}.shop.tiers[1]: unknown tier bacth, did you mean "batch"?'),
        ("[gold, batch]", "[]", f"@tiers: []@: {T}.shop.tiers: is empty: at least one of gold, batch is needed, here or"),
        ("[gold, batch]", "[gold, gold]", f"@gold]@: {T}.shop.tiers[1]: the tier gold is already listed at @gold, gold@"),
        ("max_in_flight: 8", "tiers: []", f"@tiers: []@: {T}.shop.tiers: duplicate key: it is already given at @tiers: [gold@"),
        (
            "open: {",
            TWO_KEYS.replace(OTHER, HASH),
            f"@hash#2@: {T}.open.keys[0].hash: the same key is already used at @hash@: a key has one tenant",
        ),
        (
            "open: {",
            TWO_KEYS.replace("k2", "k1"),
            f"@id: k1#2@: {T}.open.keys[0].id: the key id k1 is already used at @id: k1@: ids are unique",
        ),
        (
            "min: 5%",
            "min: 60%}\n  other: {priority: 1, min: 50%",
            "@tiers:#2@: tiers: the tiers' min sum to 110%: at most 100% is allowed (batch 60% at @min@, other 50% at @min#2@)",
        ),
        (
            "group:docs",
            "group:dcos",
            f'@cache_domain@: {T}.no.cache_domain: there is no group dcos, did you mean "docs"?',
        ),
        (
            "[acme/no]",
            "[]",
            f"@cache_domain@: {T}.no.cache_domain: acme/no is not a member of the group docs: add it at @members@",
        ),
        (
            "[acme/no]",
            "[acme/no, acme/shpo]",
            '@acme/shpo@: groups.docs.members[1]: there is no tenant acme/shpo, did you mean "acme/shop"?',
        ),
        ("[acme/no]", "[acme/no, acme/no]", "@acme/no#2@: groups.docs.members[1]: acme/no is already listed at @acme/no@"),
        ("[gpt-4o-mini]", "[xx, xx]", "@xx#2@: models.small.aliases[1]: the alias xx is already used at @xx@"),
        ("[gpt-4o-mini]", "[small]", "@small#2@: models.small.aliases[0]: the alias small is a model's own name (@small@)"),
        ("version: 1", "version: 2", '@2@: version: "2" is out of bounds: a whole number from 1 to 1 is allowed'),
        ("priority: 100", "priority: high", '@high@: tiers.gold.priority: "high" is a text: a whole number from'),
        (
            "shaping: balanced",
            "shaping: no",
            '@no@: tiers.gold.shaping: "no" is unknown: one of off, gentle, balanced, strict is',
        ),
        ("min: 5%", "min: 100%", '@100%@: tiers.batch.min: "100%" is out of bounds: a percentage from 0% to 99% is allowed'),
        (HASH, "word", f'@"word@: {T}.shop.keys[0].hash: "word" is not allowed: a hash as `fairlane keys new` prints it'),
    ],
)
def test_a_mistake_is_found_with_both_places_named(old: str, new: str, line: str) -> None:
    text = GOOD.replace(old, new, 1)
    expected = located(text, f"p:{line}")
    assert [found[: len(expected)] for found in findings(text)] == [expected]


def located(text: str, line: str) -> str:
    def place(match: re.Match[str]) -> str:
        index = -1
        for _ in range(int(match[2] or 1)):
            index = text.index(match[1], index + 1)
        before = text[:index]
        return f"{before.count(chr(10)) + 1}:{index - before.rfind(chr(10))}"

    return re.sub(r"@([^@#]+)(?:#(\d))?@", place, line)


def test_a_policy_without_tiers_or_tenants_is_refused() -> None:
    assert findings("version: 1\ntiers: {}\norganisations: {}") == [
        "p:2:1: tiers: is empty: at least one tier is needed",
        "p:3:1: organisations: has no tenant: at least one is needed",
    ]


@pytest.mark.parametrize(
    "secret", ["fl_" + "aB3_" * 11, "sk-" + "aB3d" * 8, "AKIA" + "A1B2" * 4, "-----BEGIN RSA PRIVATE KEY-----"]
)
def test_a_live_key_in_clear_text_is_refused_and_not_repeated(secret: str) -> None:
    text = GOOD.replace("scheduler:", f"# {secret}\nscheduler:")
    assert findings(text) == [
        "p:3:3: SECRET_IN_POLICY: looks like a live key in clear text: only its hash belongs here; revoke the key"
    ]


def test_a_key_where_its_hash_belongs_is_refused_and_not_repeated() -> None:
    secret = "fl_" + "aB3_" * 11
    told = "\n".join(findings(GOOD.replace(HASH, secret)))
    assert ("SECRET_IN_POLICY" in told, secret in told) == (True, False)


@pytest.mark.parametrize(
    ("old", "new", "warning"),
    [
        (
            "2027-01-31",
            "2026-05-31",
            f"@not_after@: {T}.shop.keys[0].not_after: 2026-05-31 is past: the key k1 is refused",
        ),
        (
            "[acme/no]",
            "[acme/no, acme/open]",
            '@acme/open@: groups.docs.members[1]: acme/open may use the group but does not: its cache_domain is "public"',
        ),
        ("min: 5%", "min: 5%, weight: 2", f"@weight@: tiers.batch.weight: {UNFAIR}"),
        ("tiers: vip", "tiers: fcfs", "@shaping@: tiers.gold.shaping: has no effect with scheduler.tiers fcfs"),
    ],
)
def test_what_is_probably_not_meant_is_a_warning(old: str, new: str, warning: str) -> None:
    text = GOOD.replace(old, new)
    assert load_policy_text(text.encode(), "p", TODAY).warnings[0] == located(text, f"p:{warning}")


def test_the_last_day_of_a_key_is_still_a_good_day() -> None:
    assert load_policy_text(GOOD.encode(), "p", datetime.date(2027, 1, 31)).warnings == ()


def test_a_world_writable_file_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(GOOD)
    path.chmod(0o666)
    assert load_policy_file(path, TODAY).warnings == (f"{path}: is writable by every user of this machine: chmod o-w",)


def test_a_list_of_fifty_thousand_names_is_judged_in_linear_time() -> None:
    # 50,000 repeated names would take 2.5 * 10**9 comparisons if each were sought in the list before it.
    names = ", ".join(["batch"] * 50_000)
    assert len(findings(GOOD.replace("[gold, batch]", f"[{names}]"))) == 49_999
