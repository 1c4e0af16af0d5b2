"""`fairlane policy` on the command line: what a policy comes to, its schema, and exit codes that scripts can rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairlane.cli import app
from fairlane.gateway.policy.loader import load_policy_text

ROOT = Path(__file__).parents[3]
HASH = "hmac-sha256:" + "a" * 64

TEXT = f"""version: 1
tiers:
  gold: {{priority: 2, max_output_tokens: 2k, shaping: {{prefill_share: 50%}}}}
  batch: {{priority: 1, min: 12.5%, ceil: 60%}}
organisations:
  acme:
    tiers: [batch]
    max_in_flight: 9
    tenants:
      shop:
        tiers: [gold]
        keys: [{{id: k1, hash: "{HASH}", not_after: 2999-01-31}}]
        max_wait: 90s
        kv_limit: 10k
        budgets: [{{per: day, tokens: 50k, on_exhausted: {{demote_to: batch}}}}]
        members: {{max_in_flight: 2}}
      heir: {{}}
"""

SHOP = """acme/shop
  tiers                        gold                                                           line 11
  models                       all                                                            default
  cache_domain                 tenant:acme/shop                                               default
  weight                       1                                                              default
  budgets (not enforced yet)   {per: day, tokens: 50000, on_exhausted: {demote_to: batch}}    line 15
  keys                         k1 until 2999-01-31                                            line 12
  min                          0%                                                             default
  kv_limit                     10000 tokens                                                   line 14
  max_in_flight of all acme    9                                                              line 8
  max_wait in gold             90s                                                            acme/shop
  max_output_tokens in gold    2000                                                           tier gold
"""


def section(text: str, title: str) -> list[list[str]]:
    """The rows of a section as their words, whatever the widths of the columns."""
    body = text.split(f"\n{title}\n", 1)[1].split("\n\n", 1)[0]
    return [line.split() for line in body.splitlines()]


def test_every_value_is_shown_with_where_it_comes_from() -> None:
    shown = load_policy_text(TEXT.encode(), "p").render()
    assert section(shown, "acme/shop") == [line.split() for line in SHOP.splitlines()[1:]]


def test_inherited_values_name_the_node_above() -> None:
    shown = load_policy_text(TEXT.encode(), "p").render()
    assert section(shown, "acme/heir")[0] == ["tiers", "batch", "acme,", "line", "7"]


def test_members_are_shown_with_every_cap_above_them() -> None:
    rows = section(load_policy_text(TEXT.encode(), "p").render(), "acme/shop/* (members)")
    assert [row for row in rows if row[0] == "max_in_flight"] == [
        ["max_in_flight", "2", "line", "16"],
        ["max_in_flight", "of", "all", "acme", "9", "line", "8"],
    ]


def test_tiers_are_written_as_the_file_would() -> None:
    shown = load_policy_text(TEXT.encode(), "p").render()
    assert (section(shown, "tier gold")[-1], section(shown, "tier batch")[-2]) == (
        ["shaping", "{prefill_share:", "50%,", "pause_decodes:", "true}", "line", "3"],
        ["ceil", "60%", "line", "4"],
    )


def test_no_hash_is_shown() -> None:
    assert HASH not in load_policy_text(TEXT.encode(), "p").render()


def test_what_is_not_enforced_is_listed_with_its_place() -> None:
    assert load_policy_text(TEXT.encode(), "p").not_enforced == (
        "p:15:9: organisations.acme.tenants.shop.budgets: is not enforced yet",
    )


@pytest.mark.parametrize("scheduler", ["within_tenant: fcfs, cost: tokens", "within_tenant: deadline, cost: drf"])
def test_every_value_of_the_scheduler_is_enforced(scheduler: str) -> None:
    body = "tiers: {t: {priority: 1}}\norganisations: {o: {tiers: [t]}}\n"
    assert load_policy_text(f"version: 1\nscheduler: {{{scheduler}}}\n{body}".encode(), "p").not_enforced == ()


def run(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["policy", *arguments], input=stdin)
    return result.exit_code, result.stdout, result.stderr


def test_render_prints_what_the_policy_says(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(TEXT)
    code, out, _ = run("render", str(file))
    assert (code, section(out, "acme/heir")[0][1]) == (0, "batch")


def test_schema_prints_the_shipped_schema() -> None:
    assert run("schema") == (0, (ROOT / "configs" / "tenants.schema.json").read_text(), "")


def test_check_lists_warnings_and_what_is_not_enforced() -> None:
    text = TEXT.replace("priority: 1,", "priority: 1, weight: 3,")
    code, out, err = run("check", "-", stdin=text)
    assert (code, out, [line.split(": ", 1)[0] for line in err.splitlines()]) == (
        0,
        "-: ok: 2 tiers, 2 tenants, 1 keys, 1 not enforced yet\n",
        ["warning", "note"],
    )


def test_strict_makes_warnings_errors() -> None:
    text = TEXT.replace("priority: 1,", "priority: 1, weight: 3,")
    assert (run("check", "--strict", "-", stdin=text)[0], run("check", "--strict", "-", stdin=TEXT)[0]) == (1, 0)


@pytest.mark.parametrize("command", ["check", "render"])
def test_a_bad_file_is_exit_code_1_with_every_finding(command: str) -> None:
    code, out, err = run(command, "-", stdin="version: 2\ntires: {}\n")
    assert (code, out, len(err.splitlines())) == (1, "", 4)


@pytest.mark.parametrize("command", ["check", "render"])
@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "device"])
def test_what_cannot_be_read_is_exit_code_2_and_one_line(command: str, kind: str, tmp_path: Path) -> None:
    path = {"folder": tmp_path, "device": Path("/dev/null")}.get(kind, tmp_path / "p.yaml")
    if kind == "pipe":
        os.mkfifo(path)
    code, out, err = run(command, str(path))
    assert (code, out, len(err.splitlines()), str(path) in err) == (2, "", 1, True)


def test_an_empty_standard_input_is_exit_code_2_and_one_line() -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-m", "fairlane", "policy", "check", "-"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
