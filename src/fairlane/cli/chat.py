"""`fairlane chat`: a conversation at the terminal. The history is kept here and sent whole each time; the server's prefix cache
makes that cheap."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fairlane.cli import client
from fairlane.cli.exits import utf8
from fairlane.cli.generate import MaxTokens, Model, Temperature, Tier, new_request, stream


def chat(
    target: client.Target = client.DEFAULT_TARGET,
    key_file: client.KeyFile = None,
    tenant: client.Tenant = None,
    tier: Tier = "",
    model: Model = "",
    temperature: Temperature = 0.7,
    max_tokens: MaxTokens = None,
    system: Annotated[str, typer.Option(metavar="TEXT", help="A system message to begin with.")] = "",
    state_dir: client.StateDir = None,
) -> None:
    """Talk to the model. /reset forgets the conversation, /exit (or Ctrl-D) ends it.

    Example:

    fairlane chat --tier gold --system "Answer in one sentence."
    """
    import grpc

    key = client.api_key(target, key_file, tenant, state_dir)
    beginning = [("system", utf8(system, "--system"))] if system else []
    history = list(beginning)
    if sys.stdin.isatty():
        _enable_line_editing()
        typer.secho("/reset forgets the conversation, /exit ends it", err=True, dim=True)
    with client.connect(target) as channel:
        while (line := _ask()) is not None:
            if line == "/reset":
                history = list(beginning)
                continue
            if not line:
                continue
            history.append(("user", line))
            request = new_request(model, tier, temperature, max_tokens, None)
            for role, content in history:
                request.messages.messages.add(role=role, content=content)
            try:
                answer = stream(channel, request, key)
            except grpc.RpcError as error:
                typer.echo(f"fairlane: {client.explain(error, target)}", err=True)
                history.pop()  # so that the next try is not refused for the same turn
                continue
            answer.print_figures()
            history.append(("assistant", answer.text))


def _ask() -> str | None:
    """The next line; None at the end. A line that is not UTF-8 is said to be so, and counts as empty."""
    try:
        line = _line().strip()
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeError:
        typer.echo("fairlane: that line is not UTF-8 text", err=True)
        return ""
    return None if line == "/exit" else line


def _line() -> str:
    """Raises EOFError at the end and UnicodeError for bytes that are not UTF-8."""
    if sys.stdin.isatty():
        line = input("> ")
        line.encode()  # what could not be decoded is in there as surrogates
        return line
    raw = sys.stdin.buffer.readline()  # input() would lose the lines after a bad one
    if not raw:
        raise EOFError
    return raw.decode()


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401  # gives input() history and editing
    except ImportError:
        return
