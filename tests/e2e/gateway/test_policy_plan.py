"""`fairlane policy plan` between files and against a real server: one answer, told in words, as JSON and by exit code."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from fairlane.protos.fairlane.v1 import admin_pb2
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from gateway_world import Service, policy_text

pytestmark = pytest.mark.asyncio

Run = Callable[..., Awaitable[Any]]


@pytest.fixture
def new(served: Service, tmp_path: Path) -> Path:
    """gold gets less, shop loses it, docs and its key go."""
    text = policy_text(served.keys, max_output_tokens=50).replace("tiers: [gold, batch]", "tiers: [batch]")
    file = tmp_path / "new.yaml"
    file.write_text("".join(line for line in text.splitlines(keepends=True) if "docs:" not in line))
    return file


def message(output: str) -> admin_pb2.PlanPolicyResponse:
    """A printed answer without what only a server knows."""
    answer = ParseDict(json.loads(output), admin_pb2.PlanPolicyResponse())
    answer.generation = 0
    for note in answer.notes:
        note.ClearField("in_flight")
        note.ClearField("waiting")
    return answer


async def test_a_server_and_two_files_give_the_same_plan(run: Run, path: Path, new: Path) -> None:
    between = await run("policy", "plan", str(path), str(new), "--json")
    against = await run("policy", "plan", str(new), "--json")
    assert len(message(between.stdout).changes) > 3
    assert message(against.stdout) == message(between.stdout)


async def test_the_server_says_how_many_requests_each_point_is_about(served: Service, run: Run, new: Path) -> None:
    served.worker.on_add = served.worker.silent
    running = served.generate(pb.GenerateRequest(prompt="x", tier="gold"))
    await running.read()
    await running.read()
    shown = await run("policy", "plan", str(new))
    running.cancel()
    line = next(line for line in shown.stdout.splitlines() if "may not use gold any more" in line)
    assert line == (
        "  · acme/shop: may not use gold any more: new requests for it are refused, admitted ones go on in it"
        " [now in flight: 1, of them waiting: 0]"
    )


async def test_the_text_names_what_changes_and_what_is_risky(run: Run, new: Path) -> None:
    shown = (await run("policy", "plan", str(new))).stdout
    told = [
        "generation 1, in force → ",
        "~ tier gold",
        "max_output_tokens  200 → 50",
        "- tenant acme/docs",
        "- key k-docs",
        "! key k-docs: is refused at once (UNAUTHENTICATED); what its holder has in flight goes on",
    ]
    assert [part for part in told if part not in shown] == []


async def test_a_plan_changes_nothing(served: Service, run: Run, path: Path, new: Path) -> None:
    await run("policy", "plan", str(new))
    assert (served.gateway.policy_generation, path.read_text()) == (1, policy_text(served.keys))


async def test_the_exit_code_tells_changes_only_where_it_is_asked_to(run: Run, path: Path, new: Path) -> None:
    plain = await run("policy", "plan", str(new))
    changed = await run("policy", "plan", str(new), "--detailed-exitcode")
    same = await run("policy", "plan", str(path), "--detailed-exitcode")
    piped = await run("policy", "plan", "-", str(new), "--detailed-exitcode", stdin=path.read_text())
    assert (plain.exit_code, changed.exit_code, same.exit_code, piped.exit_code) == (0, 3, 0, 3)
    assert same.stdout == f"No changes: {path} says what generation 1, in force says.\n"


@pytest.mark.parametrize("by", ["server", "files"])
async def test_a_file_with_errors_has_no_plan_and_every_error_has_its_place(run: Run, path: Path, new: Path, by: str) -> None:
    new.write_text(new.read_text().replace("priority", "priorty"))
    files = [str(new)] if by == "server" else [str(path), str(new)]
    result = await run("policy", "plan", *files, "--detailed-exitcode")
    lines = result.stderr.splitlines()
    assert (result.exit_code, result.stdout, len(lines) >= 2) == (1, "", True)
    assert all(line.startswith(f"{new}:") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("a", "b", "c"), "plan takes NEW, or OLD and NEW"),
        (("-", "-"), "plan takes NEW, or OLD and NEW"),
        (("/nonexistent",), "there is no such file"),
        (("/nonexistent", "/nonexistent"), "/nonexistent"),
    ],
)
async def test_misuse_is_exit_code_2(run: Run, arguments: tuple[str, ...], says: str) -> None:
    result = await run("policy", "plan", *arguments)
    assert (result.exit_code, result.stdout, says in result.stderr) == (2, "", True)


async def test_names_from_a_file_are_never_taken_for_markup(run: Run, path: Path, tmp_path: Path) -> None:
    file = tmp_path / "[red]x.yaml"
    file.write_text(path.read_text())
    assert "[red]x.yaml" in (await run("policy", "plan", str(file))).stdout
