"""`fairlane policy get|apply|history|rollback`: the policy of a running server. Files alone are policy.py's."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from fairlane.cli import admin, client
from fairlane.cli.exits import FAILED, USAGE, stop

_MAX_BYTES = 1 << 20

Expect = Annotated[
    str,
    typer.Option(
        "--expect", metavar="SHA256", help="Refuse unless the policy file has this hash, or its first 8 digits or more."
    ),
]


def mount(app: typer.Typer) -> None:
    """Adds the commands to `fairlane policy`."""
    for name, command in (("get", get), ("apply", apply), ("history", history), ("rollback", rollback)):
        app.command(name)(command)


def get(as_json: admin.AsJson = False, target: admin.Target = admin.DEFAULT_TARGET, state_dir: client.StateDir = None) -> None:
    """Print the policy in force; its hash and generation go to standard error.

    Example: fairlane policy get > tenants.yaml
    """
    from fairlane.protos.fairlane.v1 import admin_pb2 as pb

    answer = admin.call(target, state_dir, "GetPolicy", pb.GetPolicyRequest())
    if as_json:
        admin.print_json(answer)
        return
    typer.echo(answer.text, nl=False)
    typer.echo(f"{answer.path}: generation {answer.generation}, sha256 {answer.sha256}", err=True)


def apply(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="A policy file; - reads standard input.")],
    expect: Expect = "",
    target: admin.Target = admin.DEFAULT_TARGET,
    state_dir: client.StateDir = None,
) -> None:
    """Check a policy, put it into the server's policy file and in force: both or neither.

    Returns once the worker schedules by it. What is in force already is left alone, and so is its generation. Refused where the
    server's file is read-only (POLICY_READ_ONLY): change it where it comes from, the server follows.

    Exit code 0: in force, 1: it has errors or was refused, 2: it cannot be read.

    Example: fairlane policy get > tenants.yaml; edit it; fairlane policy apply tenants.yaml
    """
    from fairlane.protos.fairlane.v1 import admin_pb2 as pb

    text = read(file)
    check = admin.call(target, state_dir, "CheckPolicy", pb.CheckPolicyRequest(text=text, name=file))
    say_findings(check.findings)
    if not check.ok:
        raise typer.Exit(FAILED)
    answer = admin.call(target, state_dir, "ApplyPolicy", pb.ApplyPolicyRequest(text=text, expected_sha256=expect))
    typer.echo(in_force(answer))


def history(
    as_json: admin.AsJson = False, target: admin.Target = admin.DEFAULT_TARGET, state_dir: client.StateDir = None
) -> None:
    """List the last policies that were in force, newest first.

    Example: fairlane policy history
    """
    from fairlane.protos.fairlane.v1 import admin_pb2 as pb

    answer = admin.call(target, state_dir, "ListPolicyHistory", pb.ListPolicyHistoryRequest())
    if as_json:
        admin.print_json(answer)
        return
    rows = [
        (
            f"{entry.generation}{' (in force)' if entry.in_force else ''}",
            admin.when(entry.applied_at),
            entry.origin,
            entry.sha256[:12],
        )
        for entry in answer.entries
    ]
    admin.print_table(("generation", "in force since", "origin", "sha256"), rows)


def rollback(
    generation: Annotated[int, typer.Argument(min=1, metavar="GENERATION", help="As `policy history` shows it.")],
    expect: Expect = "",
    target: admin.Target = admin.DEFAULT_TARGET,
    state_dir: client.StateDir = None,
) -> None:
    """Apply an earlier generation's text again, as a new generation unless it is in force already.

    Example: fairlane policy rollback 41
    """
    from fairlane.protos.fairlane.v1 import admin_pb2 as pb

    request = pb.RollbackPolicyRequest(generation=generation, expected_sha256=expect)
    answer = admin.call(target, state_dir, "RollbackPolicy", request)
    typer.echo(in_force(answer) if answer.unchanged else f"{in_force(answer)}, the text of generation {generation}")


def in_force(answer: Any) -> str:
    """What an apply came to, in a line."""
    already = "unchanged, already " if answer.unchanged else ""
    return f"{already}in force: generation {answer.generation}, sha256 {answer.sha256}"


def say_findings(findings: Iterable[Any]) -> None:
    """What is wrong with a policy, on standard error."""
    for finding in findings:
        place = f"{finding.location}: " if finding.location else ""
        typer.echo(f"{'' if finding.error else 'warning: '}{place}{finding.message}", err=True)


def read(file: str) -> str:
    """The text of a file or of standard input. Ends the command for what is no text of at most 1 MiB."""
    try:
        if file == "-":
            content = sys.stdin.buffer.read(_MAX_BYTES + 1)
        elif not Path(file).is_file():
            stop(USAGE, f"{file}: is not a regular file" if Path(file).exists() else f"{file}: there is no such file")
        else:
            with Path(file).open("rb") as opened:
                content = opened.read(_MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        stop(USAGE, f"{file}: cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        stop(USAGE, f"{file}: is not UTF-8")
    if not text or len(content) > _MAX_BYTES:
        stop(USAGE, f"{file}: is empty" if not text else f"{file}: is larger than 1 MiB")
    return text
