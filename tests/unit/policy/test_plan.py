"""What a plan says of two policies: which things come, go and move, which effective values change, and what that means."""

from __future__ import annotations

import pytest

from fairlane.gateway.policy.entitled import entitled_shares
from fairlane.gateway.policy.loader import load_policy_text
from fairlane.gateway.policy.model import Policy, Principal
from fairlane.gateway.policy.plan import Change, Kind, plan
from fairlane.gateway.policy.plan_notes import Note

OLD = f"""version: 1
scheduler: {{tiers: vip, within_tier: fair}}
tiers:
  gold:  {{priority: 2, max_wait: 10s}}
  batch: {{priority: 1, patience: 10m}}
organisations:
  acme:
    weight: 3
    max_running: 8
    tenants:
      shop: {{tiers: [gold, batch], weight: 3, max_running: 4, keys: [{{id: k-shop, hash: "hmac-sha256:{"a" * 64}"}}]}}
      docs: {{tiers: [batch], weight: 1, keys: [{{id: k-docs, hash: "hmac-sha256:{"b" * 64}"}}]}}
  saas:
    weight: 1
    keys: [{{id: k-saas, hash: "hmac-sha256:{"c" * 64}", may_act_for: children}}]
    tenants:
      paid: {{tiers: [gold], members: {{max_in_flight: 8, max_members: 50}}}}
      free: {{tiers: [batch]}}
"""


def load(text: str) -> Policy:
    return load_policy_text(text.encode(), "tenants.yaml")


def edited(*edits: tuple[str, str]) -> Policy:
    text = OLD
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return load(text)


def changes(*edits: tuple[str, str]) -> list[tuple[object, ...]]:
    return [_brief(change) for change in plan(load(OLD), edited(*edits)).changes]


def _brief(change: Change) -> tuple[object, ...]:
    return (change.kind, change.what, change.name, change.key, change.before, change.after)


def notes(*edits: tuple[str, str]) -> list[Note]:
    return list(plan(load(OLD), edited(*edits)).notes)


def risks(*edits: tuple[str, str]) -> list[str]:
    return [f"{note.subject}: {note.message}" for note in notes(*edits) if note.risk]


def test_a_policy_against_itself_has_no_changes_and_means_nothing() -> None:
    found = plan(load(OLD), load(f"# a comment\n{OLD}"))
    assert (found.changes, found.notes) == ((), ())


def test_weights_are_worked_out_to_shares_of_the_band() -> None:
    # Who may use batch: acme (3) with shop (3) and docs (1), saas (1) with free alone.
    assert entitled_shares(load(OLD)) == {
        ("acme/shop", "gold"): 3 / 4,
        ("saas/paid", "gold"): 1 / 4,
        ("acme/shop", "batch"): 3 / 4 * 3 / 4,
        ("acme/docs", "batch"): 3 / 4 * 1 / 4,
        ("saas/free", "batch"): 1 / 4,
    }


def test_tiers_of_one_band_share_it_by_their_weights() -> None:
    shares = entitled_shares(edited(("priority: 1,", "priority: 2, weight: 3,")))
    assert (shares["saas/paid", "gold"], shares["saas/free", "batch"], sum(shares.values())) == (1 / 16, 3 / 16, 1.0)


def test_without_fair_shares_nobody_is_entitled_to_one() -> None:
    assert entitled_shares(edited(("within_tier: fair", "within_tier: fcfs"))) == {}


def test_a_tiers_limit_shows_at_the_tier_and_at_everyone_it_is_inherited_by() -> None:
    assert changes(("max_wait: 10s", "max_wait: 5s")) == [
        (Kind.CHANGED, "tier", "gold", "max_wait", "10s", "5s"),
        (Kind.CHANGED, "tenant", "acme/shop", "max_wait in gold", "10s", "5s"),
        (Kind.CHANGED, "tenant", "saas/paid", "max_wait in gold", "10s", "5s"),
        (Kind.CHANGED, "members", "saas/paid/*", "max_wait in gold", "10s", "5s"),
    ]


def test_a_weight_shows_with_the_shares_of_all_siblings() -> None:
    assert changes(("tiers: [batch], weight: 1", "tiers: [batch], weight: 3")) == [
        (Kind.CHANGED, "tenant", "acme/shop", "share in batch", "56.25%", "37.5%"),
        (Kind.CHANGED, "tenant", "acme/docs", "weight", "1", "3"),
        (Kind.CHANGED, "tenant", "acme/docs", "share in batch", "18.75%", "37.5%"),
    ]


def test_a_new_tenant_comes_with_what_it_is_given() -> None:
    found = changes(("      free: {tiers: [batch]}", "      free: {tiers: [batch]}\n      new: {tiers: [batch], weight: 2}"))
    assert [change for change in found if change[2] == "saas/new"] == [
        (Kind.ADDED, "tenant", "saas/new", "", "", ""),
        (Kind.ADDED, "tenant", "saas/new", "tiers", "", "batch"),
        (Kind.ADDED, "tenant", "saas/new", "weight", "", "2"),
        (Kind.ADDED, "tenant", "saas/new", "share in batch", "", "16.67%"),
    ]


def test_a_removed_tenant_goes_with_its_keys_and_its_admitted_work_goes_on() -> None:
    line = next(line for line in OLD.splitlines(keepends=True) if "docs:" in line)
    found = plan(load(OLD), edited((line, "")))
    removed = [(change.what, change.name) for change in found.changes if change.kind is Kind.REMOVED]
    goes_on = [note.subject for note in found.notes if not note.risk and "goes on to its end" in note.message]
    revoked = [note.subject for note in found.notes if note.risk and "refused at once" in note.message]
    assert (removed, goes_on, revoked) == ([("tenant", "acme/docs"), ("key", "k-docs")], ["acme/docs"], ["key k-docs"])


@pytest.mark.parametrize("key", ["k-docs", "k-other"])
def test_a_tenant_under_another_organisation_is_moved(key: str) -> None:
    """By its key, or where that is another one too, by its name."""
    line = next(line for line in OLD.splitlines(keepends=True) if "docs:" in line)
    there = line if key == "k-docs" else line.replace("b" * 64, "d" * 64).replace("k-docs", key)
    found = plan(load(OLD), edited((line, ""), ("      free: {tiers: [batch]}\n", f"      free: {{tiers: [batch]}}\n{there}")))
    moved = [(change.name, change.moved_from) for change in found.changes if change.kind is Kind.MOVED]
    stays = [note.subject for note in found.notes if "stays under acme/docs" in note.message]
    assert (moved, stays) == ([("saas/docs", "acme/docs")], ["saas/docs"])


def test_a_key_that_is_renamed_is_not_revoked() -> None:
    found = notes(("id: k-docs", "id: k-docs-2"))
    assert [note for note in found if note.risk] == []


def test_a_key_with_another_hash_is_revoked_and_no_hash_is_shown_in_full() -> None:
    found = plan(load(OLD), edited(("b" * 64, "d" * 64)))
    hashes = [(change.before, change.after) for change in found.changes if change.key == "hash"]
    assert (hashes, [note.subject for note in found.notes if note.risk]) == (
        [("hmac-sha256:bbbbbbbb…", "hmac-sha256:dddddddd…")], ["key k-docs"],
    )  # fmt: skip


def test_a_key_that_may_not_act_for_others_any_more_is_a_risk() -> None:
    told = risks((", may_act_for: children", ""), ("    weight: 1\n", "    weight: 1\n    tiers: [batch]\n"))
    assert told[0] == "key k-saas: may not act for others any more: naming one is TENANT_MISMATCH"


def test_a_key_that_stands_for_somebody_else_is_a_risk() -> None:
    key = f'keys: [{{id: k-docs, hash: "hmac-sha256:{"b" * 64}"}}]'
    told = risks((f", {key}", ""), ("free: {tiers: [batch]}", f"free: {{tiers: [batch], {key}}}"))
    assert "key k-docs: stands for saas/free from now on, not for acme/docs" in told


def test_tenants_that_are_moved_under_a_name_that_others_leave_too_are_taken_by_their_keys() -> None:
    """Two tenants named app go, two come; each keeps its key, and they cross."""
    text = """version: 1
tiers: {{gold: {{priority: 1}}}}
organisations:
  {0}: {{tenants: {{app: {{tiers: [gold], keys: [{{id: k1, hash: "hmac-sha256:{2}"}}]}}}}}}
  {1}: {{tenants: {{app: {{tiers: [gold], keys: [{{id: k2, hash: "hmac-sha256:{3}"}}]}}}}}}
"""
    found = plan(load(text.format("a", "b", "1" * 64, "2" * 64)), load(text.format("c", "d", "2" * 64, "1" * 64)))
    moved = {(change.moved_from, change.name) for change in found.changes if change.kind is Kind.MOVED}
    assert moved == {("a/app", "d/app"), ("b/app", "c/app")}


def test_demo_keys_are_no_part_of_a_plan() -> None:
    old = load(OLD).with_principals({"hmac-sha256:" + "e" * 64: Principal("demo", "saas/free", loopback_only=True)})
    assert plan(old, load(OLD)).notes == ()


@pytest.mark.parametrize(
    ("edit", "subject", "says"),
    [
        (("max_running: 4", "max_running: 2"), "acme/shop", "nobody is stopped: above 2 running, what waits starts only"),
        (("max_running: 8", "max_running: 4"), "acme", "nobody is stopped: above 4 running"),
        (("tiers: [batch], weight: 1", "tiers: [batch], max_in_flight: 3"), "acme/docs", "(MAX_IN_FLIGHT) until fewer than 3"),
        (("tiers: [batch], weight: 1", "tiers: [batch], max_queue: 3"), "acme/docs", "refused (QUEUE_FULL) until fewer than 3"),
        (("max_in_flight: 8", "max_in_flight: 1"), "saas/paid/*", "refused (MAX_IN_FLIGHT) until fewer than 1"),
        (("max_members: 50", "max_members: 5"), "saas/paid/*", "above 5, new ones are refused (MAX_MEMBERS)"),
        (("max_wait: 10s", "max_wait: 10s, max_queue: 9"), "tier gold", "refused (QUEUE_FULL) until fewer than 9 are waiting"),
        (("patience: 10m", "patience: 10m, ceil: 60%"), "tier batch", "above 60% of the worker's time streams pause"),
        (("weight: 3\n    max", "weight: 3\n    ceil: 7.5%\n    max"), "acme", "above 7.5% of the worker's time streams pause"),
    ],
)  # fmt: skip
def test_a_lower_cap_ends_nothing_and_says_what_happens_instead(edit: tuple[str, str], subject: str, says: str) -> None:
    assert [note.subject for note in notes(edit) if says in note.message] == [subject]


def test_a_raised_cap_means_nothing_to_requests_in_flight() -> None:
    assert [note for note in notes(("max_in_flight: 8", "max_in_flight: 9")) if note.subject != "scheduler"] == []


def test_limits_of_requests_hold_for_those_that_come() -> None:
    assert [note.subject for note in notes(("max_wait: 10s", "max_wait: 5s"))] == ["limits of a request"]


def test_a_locality_window_is_a_change_of_order() -> None:
    edit = ("within_tier: fair}", "within_tier: fair, locality_window_ms: 100}")
    changed = [change[3:] for change in changes(edit)]
    assert (changed, [note.subject for note in notes(edit)]) == ([("locality_window_ms", "0", "100")], ["scheduler"])


def test_a_change_of_order_is_told_once() -> None:
    found = notes(("weight: 3\n", "weight: 2\n"), ("priority: 2", "priority: 9"))
    assert [note.subject for note in found].count("scheduler") == 1


def test_a_tenant_that_loses_every_tier_is_a_risk() -> None:
    found = risks(("paid: {tiers: [gold]", "paid: {tiers: [batch]"))
    assert found == [
        "saas/paid: loses every tier it had (gold) and has batch instead: requests that name one of those are refused",
    ]


def test_a_tenant_that_loses_one_of_its_tiers_and_another_default_are_told_apart() -> None:
    found = notes(("tiers: [gold, batch]", "tiers: [batch]"))
    told = {(note.risk, note.message.split(":")[0]) for note in found if note.subject == "acme/shop"}
    assert told == {
        (False, "may not use gold any more"),
        (True, "its requests that name no tier run in batch instead of gold"),
    }  # fmt: skip


def test_a_share_that_falls_by_more_than_half_is_a_risk_of_its_own_tenant_only() -> None:
    found = risks(("tiers: [batch], weight: 1", "tiers: [batch], weight: 9"))
    assert found == ["acme/shop: its share in batch falls by more than half, from 56.25% to 18.75%"]


def test_a_share_that_falls_by_just_half_is_none() -> None:
    edit = ("weight: 3, max", "weight: 7, max")  # acme/docs: 1 of 8 instead of 1 of 4
    assert (entitled_shares(edited(edit))["acme/docs", "batch"], risks(edit)) == (0.09375, [])


def test_guarantees_that_leave_little_to_order_are_a_risk() -> None:
    found = risks(("priority: 2", "priority: 2, min: 60%"), ("priority: 1", "priority: 1, min: 35%"))
    assert found == ["tiers: their min sum to 95%: 5% of the worker is left to go by order"]


def test_a_tenants_guarantee_inside_its_organisations_is_not_counted_twice() -> None:
    found = risks(("    weight: 3\n", "    weight: 3\n    min: 60%\n"), ("[batch], weight: 1", "[batch], min: 50%, weight: 1"))
    assert found == []


def test_a_tier_that_higher_ones_can_starve_from_now_on_is_a_risk() -> None:
    assert risks((", patience: 10m", "")) == ["tier batch: has neither min nor patience: higher tiers can starve it"]


def test_a_tenant_that_nobody_can_call_any_more_is_a_risk() -> None:
    found = risks((f', keys: [{{id: k-docs, hash: "hmac-sha256:{"b" * 64}"}}]', ""))
    assert [line.split(": ")[0] for line in found] == ["key k-docs", "acme/docs"]


def test_a_removed_tier_says_what_becomes_of_its_requests() -> None:
    found = notes(("  gold:  {priority: 2, max_wait: 10s}\n", ""), ("[gold, batch]", "[batch]"), ("[gold]", "[batch]"))
    told = [note for note in found if note.subject == "tier gold"]
    assert [(note.tier, note.message.split(";")[0]) for note in told] == [("gold", "new requests for it get TIER_UNKNOWN")]


def test_a_key_that_is_not_enforced_yet_says_so() -> None:
    found = plan(load(OLD), edited(("version: 1", "version: 1\ntimezone: Europe/Berlin"))).changes
    assert [(change.key, change.enforced) for change in found] == [("timezone", False)]


def test_a_change_says_for_how_many_tenants_and_members_it_is() -> None:
    found = plan(load(OLD), edited(("max_wait: 10s", "max_wait: 5s"))).changes
    assert [(change.name, change.tenants, change.members) for change in found] == [
        ("gold", 2, 50), ("acme/shop", 1, 0), ("saas/paid", 1, 50), ("saas/paid/*", 1, 50),
    ]  # fmt: skip
