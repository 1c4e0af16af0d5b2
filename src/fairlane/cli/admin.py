"""What the commands for operators share: the admin address, one call to it, and how times and durations are written."""

from __future__ import annotations

import getpass
import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fairlane.cli import client
from fairlane.cli.durations import seconds_of

Target = Annotated[str, typer.Option(envvar="FAIRLANE_ADMIN_TARGET", metavar="HOST:PORT", help="The server's admin address.")]
For = Annotated[str | None, typer.Option("--for", metavar="TIME", help="Ends by itself after 90s, 30m, 12h or 2d.")]
Abort = Annotated[bool, typer.Option("--abort", help="End its requests in flight too.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")]
DEFAULT_TARGET = "127.0.0.1:50052"

# Applying a policy waits for the worker, which may be in a long step.
_TIMEOUT_S = 30.0
_NAME = re.compile(r"[^A-Za-z0-9._@-]")


def call(target: str, state_dir: Any, method: str, request: Any) -> Any:
    """The answer of one method of the Admin service; a refusal ends the command with one line."""
    from fairlane.protos.fairlane.v1 import admin_pb2_grpc

    key = client.admin_key(target, state_dir)
    with client.connect(target, client.ADMIN_KEY_VARIABLE) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]
        metadata = [*client.metadata(key), ("fairlane-operator", _who())]
        return getattr(stub, method)(request, metadata=metadata, timeout=_TIMEOUT_S)


def duration(text: str | None) -> Any:
    """30m as a protobuf Duration; None for None. Ends the command for anything else."""
    from google.protobuf.duration_pb2 import Duration

    return None if text is None else Duration(seconds=seconds_of("--for", text))


def when(timestamp: Any) -> str:
    """A protobuf Timestamp in this machine's time zone."""
    from datetime import UTC

    return str(timestamp.ToDatetime(UTC).astimezone().isoformat(sep=" ", timespec="seconds"))


def print_json(answer: Any) -> None:
    from google.protobuf.json_format import MessageToJson

    typer.echo(MessageToJson(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))


def print_table(headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Plain columns. A row that is too long is the terminal's to wrap: an id in two cells' lines could not be copied."""
    lines = [headers, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def say_overridden(what: str, answer: Any) -> None:
    """What an OverrideResponse means."""
    until = f"until {when(answer.override.until)}" if answer.override.HasField("until") else "until it is lifted"
    aborted = f"; {answer.aborted} requests ended" if answer.aborted else ""
    typer.echo(f"{answer.override.name}: {what} {until}{aborted}")
    _warn(answer)


def say_lifted(name: str, what: str, answer: Any) -> None:
    """What a LiftResponse means."""
    typer.echo(f"{name}: {what}" if answer.lifted else f"{name}: nothing to lift")
    _warn(answer)


def _warn(answer: Any) -> None:
    if not answer.persisted:
        typer.echo("fairlane: warning: in force, but not written to disk: a restart of the server forgets it", err=True)


def _who() -> str:
    try:
        return _NAME.sub("_", getpass.getuser())[:64] or "unknown"
    except (OSError, KeyError):  # a user id without a name
        return "unknown"
