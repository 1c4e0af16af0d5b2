"""The operator's commands against a real gateway: what they do, print and exit with."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fairlane.cli import app
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from gateway_world import Service, policy_text

pytestmark = pytest.mark.asyncio

REQUEST = pb.GenerateRequest(prompt="x", request_id="request-1")

Run = Callable[..., Awaitable[Any]]


async def test_a_tenant_is_suspended_for_a_while_and_resumed(served: Service, run: Run, refused: Any) -> None:
    done = await run("tenants", "suspend", "acme/shop", "--for", "30m")
    refusal = await refused(served.generate(REQUEST))
    status = await run("status")
    lifted = await run("tenants", "resume", "acme/shop")
    again = await run("tenants", "resume", "acme/shop")
    assert (done.exit_code, re.match(r"acme/shop: suspended until 2\d\d\d-", done.stdout) is not None) == (0, True)
    assert (refusal.reason, "acme/shop: suspended until" in status.stdout) == ("SUSPENDED", True)
    assert (lifted.stdout, again.stdout) == ("acme/shop: resumed\n", "acme/shop: nothing to lift\n")


async def test_suspending_with_abort_says_how_many_requests_it_ended(served: Service, run: Run, refused: Any) -> None:
    served.worker.on_add = served.worker.silent
    call = served.generate(REQUEST)
    await call.read()
    done = await run("tenants", "suspend", "acme", "--abort")
    assert ((await refused(call)).reason, done.stdout) == ("SUSPENDED", "acme: suspended until it is lifted; 1 requests ended\n")


async def test_a_tier_is_paused_and_resumed(served: Service, run: Run, refused: Any) -> None:
    paused = await run("tiers", "pause", "gold")
    refusal = await refused(served.generate(REQUEST))
    resumed = await run("tiers", "resume", "gold")
    assert (paused.stdout, refusal.reason, resumed.stdout) == (
        "gold: paused until it is lifted\n", "TIER_PAUSED", "gold: resumed\n",
    )  # fmt: skip


async def test_a_key_is_revoked_and_restored(served: Service, run: Run, refused: Any) -> None:
    revoked = await run("keys", "revoke", "k-shop")
    refusal = await refused(served.generate(REQUEST))
    restored = await run("keys", "restore", "k-shop")
    assert (revoked.stdout, refusal.reason, restored.stdout) == (
        "k-shop: revoked until it is lifted\n", "UNAUTHENTICATED", "k-shop: restored\n",
    )  # fmt: skip


async def test_requests_are_listed_and_cancelled(served: Service, run: Run, refused: Any) -> None:
    served.worker.on_add = served.worker.silent
    call = served.generate(REQUEST)
    await call.read()
    await call.read()
    table = await run("requests", "list")
    as_json = json.loads((await run("requests", "list", "--node", "acme", "--tier", "gold", "--json")).stdout)
    done = await run("requests", "cancel", "acme/shop", "request-1")
    none = await run("requests", "list")
    assert re.search(r"acme/shop +request-1 +gold +running +\d+\.\d s +k-shop", table.stdout) is not None
    assert [request["request_id"] for request in as_json["requests"]] == ["request-1"]
    assert ((await refused(call)).reason, done.stdout, none.stdout) == (
        "CANCELLED", "request-1: cancelled\n", "0 in flight\n",
    )  # fmt: skip


async def test_a_policy_is_fetched_edited_applied_and_rolled_back(served: Service, run: Run, path: Path, tmp_path: Path) -> None:
    fetched = await run("policy", "get")
    edited = tmp_path / "edited.yaml"
    edited.write_text(fetched.stdout.replace("max_output_tokens: 200", "max_output_tokens: 50"))
    sha256 = re.search(r"sha256 ([0-9a-f]{64})", fetched.stderr)
    assert sha256 is not None
    applied = await run("policy", "apply", str(edited), "--expect", sha256[1][:12])  # as `fairlane status` shows it
    late = await run("policy", "apply", str(edited), "--expect", sha256[1])
    history = await run("policy", "history")
    back = await run("policy", "rollback", "1")
    assert (fetched.stdout, applied.stdout.startswith("in force: generation 2, sha256 ")) == (policy_text(served.keys), True)
    assert (late.exit_code, "POLICY_CONFLICT" in late.stderr) == (1, True)
    assert re.search(r"2 \(in force\) .* apply .*\n1 .* start ", history.stdout) is not None
    assert (back.exit_code, path.read_text()) == (0, policy_text(served.keys))


async def test_a_bad_policy_is_not_sent_and_every_finding_is_shown(served: Service, run: Run, path: Path) -> None:
    result = await run("policy", "apply", "-", stdin=policy_text(served.keys).replace("priority", "priorty"))
    lines = result.stderr.splitlines()
    assert (result.exit_code, result.stdout, len(lines) >= 2) == (1, "", True)
    assert all(line.startswith("-:") for line in lines)
    assert path.read_text() == policy_text(served.keys)


async def test_a_read_only_file_is_said_to_be_changed_where_it_comes_from(served: Service, run: Run, path: Path) -> None:
    path.chmod(0o444)
    result = await run("policy", "apply", "-", stdin=policy_text(served.keys, max_output_tokens=9))
    assert (result.exit_code, "POLICY_READ_ONLY" in result.stderr) == (1, True)


async def test_status_says_loudly_that_the_file_is_not_in_force(served: Service, run: Run, path: Path, until: Any) -> None:
    path.write_text("tiers: [")
    await until(lambda: served.gateway._reloader.error)
    shown = (await run("status")).stdout
    assert "generation 1" in shown
    assert f"POLICY FILE NOT IN FORCE: it cannot be used, generation 1 stays:\n  {path}:" in shown


@pytest.mark.parametrize(
    "command",
    ["tenants suspend", "tenants resume", "tiers pause", "tiers resume", "requests list", "requests cancel", "keys revoke",
     "keys restore", "policy get", "policy apply", "policy history", "policy rollback", "requests explain", "trace export"],
)  # fmt: skip
async def test_every_command_has_help_with_an_example(command: str) -> None:
    shown = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"})
    assert (shown.exit_code, f"Example: fairlane {command.split()[0]}" in shown.stdout) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("tenants", "suspend", "acme/shpo"), 1, "NODE_NOT_FOUND"),
        (("tenants", "suspend", "acme/shpo"), 1, 'no organisation, tenant or member "acme/shpo", did you mean "acme/shop"?'),
        (("tenants", "suspend", "acme", "--for", "soon"), 2, "--for soon: a time such as 90s"),
        (("tenants", "suspend", "acme", "--for", "0s"), 2, "--for 0s"),
        (("tiers", "pause", "glod"), 1, "TIER_UNKNOWN"),
        (("tiers", "pause", "glod"), 1, 'there is no tier "glod", did you mean "gold"?'),
        (("keys", "revoke", "nobody"), 1, "KEY_NOT_FOUND"),
        (("requests", "list", "--node", "acme/shpo"), 1, "NODE_NOT_FOUND"),
        (("requests", "cancel", "acme/shop", "none"), 1, "REQUEST_NOT_FOUND"),
        (("policy", "rollback", "77"), 1, "GENERATION_NOT_FOUND"),
        (("policy", "rollback", "77"), 1, "the history has no generation 77: it has 1\n"),
        (
            ("policy", "rollback", "1", "--expect", "5f0c"),
            1,
            "expected_sha256: must be a SHA-256, or its first 8 hexadecimal digits and more",
        ),
        (("policy", "apply", "/nonexistent"), 2, "there is no such file"),
        (("policy", "apply", "/dev/null"), 2, "is not a regular file"),
    ],
)
async def test_what_cannot_be_done_is_one_message_and_an_exit_code(
    run: Run, arguments: tuple[str, ...], code: int, message: str
) -> None:
    result = await run(*arguments)
    assert (result.exit_code, result.stdout, message in result.stderr) == (code, "", True)
