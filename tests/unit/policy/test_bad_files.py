"""Policy files as people, tools and attackers break them, one row each: what is refused, and the one line that says why. The rows
are grouped by what goes wrong; the last test checks that nothing between a whole file and an empty one ever crashes."""

from __future__ import annotations

import datetime
import os
import tracemalloc
from pathlib import Path

import pytest

from fairlane.config.source import UnreadableFile
from fairlane.errors import ConfigError
from fairlane.gateway.policy.loader import load_policy_file, load_policy_text
from fairlane.gateway.policy.model import Policy

ROOT = Path(__file__).parents[3]
TODAY = datetime.date(2026, 6, 1)
HASH = "hmac-sha256:" + "a" * 64
GOOD = """version: 1
tiers: {gold: {priority: 1, max_output_tokens: 1000}}
models: {small: {}}
organisations:
  acme:
    tenants:
      shop: {tiers: [gold]}
"""


def findings(text: str | bytes) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_policy_text(text.encode() if isinstance(text, str) else text, "p", TODAY)
    return list(caught.value.findings)


def shop(extra: str) -> str:
    return GOOD.replace("[gold]}", f"[gold], {extra}}}")


S = "organisations.acme.tenants.shop"

REPEATED = [
    (GOOD + "version: 1\n", "p:8:1: version: duplicate key: it is already given at 1:1"),
    (GOOD + "      shop: {tiers: [gold]}\n", f"p:8:7: {S}: duplicate key: it is already given at 7:7"),
    (
        shop(f'keys: [{{id: a, hash: "{HASH}"}}, {{id: b, hash: "{HASH}"}}]'),
        f"p:7:139: {S}.keys[1].hash: the same key is already used at 7:44: a key has one tenant",
    ),
    (
        shop('identities: ["spiffe://x/y", "spiffe://x/y"]'),
        f"p:7:58: {S}.identities[1]: the same identity is already used at 7:42: an identity has one tenant",
    ),
    (
        shop("budgets: [{per: day, tokens: 1}, {per: day, tokens: 2}]"),
        f"p:7:63: {S}.budgets[1].per: there is already a budget per day at 7:39",
    ),
]

MISSPELT = [
    (shop("weigth: 1"), f'p:7:29: {S}.weigth: unknown key, did you mean "weight"?'),
    (shop("members: {max_inflight: 1}"), f'p:7:39: {S}.members.max_inflight: unknown key, did you mean "max_in_flight"?'),
    (GOOD + "scheduler: {tiers: vipp}\n", 'p:8:20: scheduler.tiers: "vipp" is unknown, did you mean "vip"?'),
    (GOOD + "scheduler: {cost: rooflin}\n", 'p:8:19: scheduler.cost: "rooflin" is unknown, did you mean "roofline"?'),
    (GOOD + "timezone: Europe/Berlni\n", 'p:8:1: timezone: unknown time zone Europe/Berlni, did you mean "Europe/Berlin"?'),
]

WEIGHTS = [
    (shop(f"weight: {value}"), f"p:7:37: {S}.weight: {echoed} {why}: a number above 0 up to 1000000 is allowed")
    for value, echoed, why in [
        ("-3", '"-3"', "is out of bounds"),
        ("0", '"0"', "is out of bounds"),
        (".nan", '".nan"', "is not a finite number"),
        (".inf", '".inf"', "is not a finite number"),
        ("1e400", '"1e400"', "is not a finite number"),
        ('"2"', '"2"', "is a text (it is quoted)"),
    ]
]

NUMBERS = [
    (shop(f"tokens_per_minute: {value}"), f'p:7:48: {S}.tokens_per_minute: "{value}" {why}: a whole number or one such as 100k')
    for value, why in [
        ("lots", "is a text"),
        ("12:30", "is a text"),
        ("1_000", "is a text"),
        ("014", "has a leading zero (octal in YAML 1.1, decimal in 1.2)"),
        ("5%", "is a text"),
    ]
]

NOT_YAML = [
    ("version: 1\n\ttiers: {}", "p:2:1: is not YAML: found character a tab"),
    ("tiers: [", "p:1:9: is not YAML"),
    (GOOD + "---\n" + GOOD, "p:8:1: a second document starts here: one document per file"),
    ("", "p:1:1: is empty: a mapping is needed"),
    ("# nothing but this\n", "p:1:1: is empty: a mapping is needed"),
    ("- version: 1\n", "p:1:1: is a list: a mapping with the keys version"),
    ("version: 1\n# Zürich".encode("latin-1"), "p:2:4: is not UTF-8: byte 0xfc; save the file as UTF-8"),
    ("version: 1\0", "p:1:11: contains a NUL byte"),
]

HOSTILE = [
    ("version: !!python/object/apply:os.system [id]", "p:1:10: version: tags (!) are not allowed"),
    ("version: !env HOME", "p:1:10: version: tags (!) are not allowed"),
    ("a: &a [x]\nb: &b [*a, *a]\n", "p:1:4: a: anchors and aliases (&, *) are not allowed"),
    ("a: &a [*a]", "p:1:4: a: anchors and aliases (&, *) are not allowed"),
    ("[" * 5000, "p:1:33: is nested too deeply: at most 32 levels"),
    (GOOD.replace("1", "9" * 5000, 1), "p:1:10: version: (a text of 5000 characters) has 5000 digits"),
    (b"#" * (50 << 20), "p: is larger than 1 MiB: at most 1048576 bytes"),
]

UNKNOWN = [
    (shop("models: [smal]"), f'p:7:38: {S}.models[0]: unknown model smal, did you mean "small"?'),
    (GOOD.replace("[gold]", "[glod]"), f'p:7:22: {S}.tiers[0]: unknown tier glod, did you mean "gold"?'),
    (
        shop("budgets: [{per: day, tokens: 1, on_exhausted: {demote_to: glod}}]"),
        f'p:7:76: {S}.budgets[0].on_exhausted.demote_to: unknown tier glod, did you mean "gold"?',
    ),
    (shop('cache_domain: "group:docs"'), f"p:7:29: {S}.cache_domain: there is no group docs"),
]

TOO_MUCH = [
    (
        shop("kv_guarantee: 60%").replace("  acme:\n", "  other: {tiers: [gold], kv_guarantee: 50%}\n  acme:\n"),
        "p:4:1: organisations: their kv_guarantee sum to 110%: at most 100% is allowed "
        "(other 50% at 5:26, acme/shop 60% at 8:29)",
    ),
    (
        shop("tokens_per_minute: 500"),
        f"p:7:29: {S}.tokens_per_minute: allows 500 tokens at once: less than the largest request, "
        "whose max_output_tokens is 1000 at 2:29; such a request could never be admitted",
    ),
    (
        shop("tokens_per_minute: 6k, burst: 5s"),
        f"p:7:52: {S}.burst: allows 500 tokens at once: less than the largest request, whose max_output_tokens is 1000 at 2:29",
    ),
]

SECRETS = [
    (f"# {secret}\n{GOOD}", "p:1:3: SECRET_IN_POLICY: looks like a live key in clear text")
    for secret in ["fl_" + "aB3_" * 11, "sk-" + "aB3d" * 8, "AKIA" + "A1B2" * 4, "hf_" + "aB3d" * 9]
]


@pytest.mark.parametrize(
    ("text", "line"),
    [*REPEATED, *MISSPELT, *WEIGHTS, *NUMBERS, *NOT_YAML, *HOSTILE, *UNKNOWN, *TOO_MUCH, *SECRETS],
)
def test_a_broken_file_is_refused_with_one_line_that_says_where_and_why(text: str | bytes, line: str) -> None:
    found = findings(text)
    assert (len(found), found[0][: len(line)]) == (1, line)


def test_the_good_file_of_these_tests_is_good() -> None:
    assert load_policy_text(GOOD.encode(), "p", TODAY).warnings == ()


def test_a_tenant_named_no_is_a_tenant() -> None:
    policy = load_policy_text(GOOD.replace("shop", "no").encode(), "p", TODAY)
    assert list(policy.nodes) == ["acme", "acme/no"]


def test_a_byte_order_mark_is_accepted() -> None:
    assert list(load_policy_text(b"\xef\xbb\xbf" + GOOD.encode(), "p", TODAY).tiers) == ["gold"]


def test_a_secret_is_never_repeated() -> None:
    secret = "fl_" + "aB3_" * 11
    told = "\n".join([*findings(shop(f"{secret}: 1")), *findings(GOOD.replace("[gold]", f"[{secret}]"))])
    assert ("SECRET_IN_POLICY" in told, secret in told) == (True, False)


def test_a_bomb_costs_no_more_than_its_own_text() -> None:
    # Ten aliases a level would be 10**20 values if anything were constructed.
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 21)]
    bomb = "\n".join(["l0: &l0 [x]", *levels])
    tracemalloc.start()
    try:
        found = findings(bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found, peak < 1 << 20) == (["p:1:5: l0: anchors and aliases (&, *) are not allowed: write the value out"], True)


def test_many_mistakes_of_every_kind_are_told_in_one_run() -> None:
    text = GOOD.replace("version: 1", "version: 2").replace("priority: 1", "priorty: 1") + "extra: 1\nversion: 3\n"
    assert [line.split(": ", 2)[1] for line in findings(text)] == [
        "version",
        "tiers.gold.priority",
        "tiers.gold.priorty",
        "extra",
        "version",
    ]


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "device", "dangling link"])
def test_what_is_no_file_is_unreadable_in_one_line_and_without_waiting(kind: str, tmp_path: Path) -> None:
    path = {"folder": tmp_path, "device": Path("/dev/null")}.get(kind, tmp_path / "p.yaml")
    if kind == "pipe":
        os.mkfifo(path)
    if kind == "dangling link":
        path.symlink_to(tmp_path / "none")
    with pytest.raises(UnreadableFile) as caught:
        load_policy_file(path, TODAY)
    assert [line.startswith(f"{path}: ") for line in caught.value.findings] == [True]


def test_a_truncated_file_is_a_policy_or_findings_and_never_anything_else() -> None:
    whole = (ROOT / "configs" / "policies" / "saas.yaml").read_bytes()
    outcomes = set()
    for end in range(0, len(whole), 23):
        try:
            outcomes.add(type(load_policy_text(whole[:end], "p", TODAY)))
        except ConfigError as error:
            outcomes.add(ConfigError)
            assert all(line.startswith("p:") for line in error.findings)
    assert outcomes == {Policy, ConfigError}
