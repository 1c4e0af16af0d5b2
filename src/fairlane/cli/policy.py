"""`fairlane policy`: is a policy file right? The same checks as the server's, so that a file that passes here loads there."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane.cli.exits import FAILED, USAGE, needs, stop

if TYPE_CHECKING:
    from fairlane.gateway.policy.model import Policy

app = typer.Typer(no_args_is_help=True, help="Check tenant policies.")


@app.callback()
def policy() -> None:
    """Check tenant policies."""


@app.command()
def check(file: Annotated[str, typer.Argument(metavar="FILE|-", help="A policy file; - reads standard input.")]) -> None:
    """Check a policy file and report every mistake, each as file:line:col: path: what: what is allowed.

    Exit code 0: it can be used (warnings are printed), 1: it has errors, 2: it cannot be read.

    Example: fairlane policy check configs/tenants.yaml
    """
    with needs("server"):
        from fairlane.config.source import UnreadableFile
        from fairlane.errors import ConfigError
    try:
        found = _load(file)
    except UnreadableFile as error:
        stop(USAGE, str(error))
    except ConfigError as error:
        for finding in error.findings:
            typer.echo(finding, err=True)
        raise typer.Exit(FAILED) from None
    for warning in found.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(f"{file}: ok: {len(found.tiers)} tiers, {len(found.nodes)} tenants, {len(found.principals)} keys")


def _load(file: str) -> Policy:
    from fairlane.config.source import MAX_BYTES, UnreadableFile
    from fairlane.gateway.policy.loader import load_policy_file, load_policy_text

    if file != "-":
        return load_policy_file(file)
    try:
        text = sys.stdin.buffer.read(MAX_BYTES + 1)
    except OSError as error:
        raise UnreadableFile([f"standard input: cannot be read: {error.strerror}"]) from None
    if not text:
        raise UnreadableFile(["standard input: is empty: there is nothing to check"])
    return load_policy_text(text, "<stdin>")
