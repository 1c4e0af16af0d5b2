"""`fairlane policy`: is a policy file right, what does it come to, and what may it hold? The same checks as the server's, so that
a file that passes here loads there."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane.cli.exits import FAILED, USAGE, needs, stop

if TYPE_CHECKING:
    from fairlane.gateway.policy.model import Policy

app = typer.Typer(no_args_is_help=True, help="Check, compare and apply tenant policies.")

File = Annotated[str, typer.Argument(metavar="FILE|-", help="A policy file; - reads standard input.")]


@app.callback()
def policy() -> None:
    """Check tenant policies, and see what they come to."""


@app.command()
def check(
    file: File,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as errors (exit code 1).")] = False,
) -> None:
    """Check a policy file and report every mistake, each as file:line:col: path: what: what is allowed.

    Warnings name what has no effect or was hardly meant; keys that this version reads but does not enforce yet are listed too.

    Exit code 0: it can be used, 1: it has errors, 2: it cannot be read.

    Example: fairlane policy check configs/tenants.yaml
    """
    found = load_or_stop(file)
    for warning in found.warnings:
        typer.echo(f"warning: {warning}", err=True)
    for note in found.not_enforced:
        typer.echo(f"note: {note}", err=True)
    if strict and found.warnings:
        typer.echo(f"{file}: {len(found.warnings)} warnings, which --strict makes errors", err=True)
        raise typer.Exit(FAILED)
    tenants = sum(node.is_tenant for node in found.nodes.values())
    later = f", {len(found.not_enforced)} not enforced yet" if found.not_enforced else ""
    typer.echo(f"{file}: ok: {len(found.tiers)} tiers, {tenants} tenants, {len(found.principals)} keys{later}")


@app.command()
def render(file: File) -> None:
    """Print every value that holds, and where it comes from: a line of the file, a node above, a tier or a default.

    Exit codes as of `check`.

    Example: fairlane policy render configs/policies/saas.yaml
    """
    typer.echo(load_or_stop(file).render(), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON Schema of policy files, for editors. It is shipped as configs/tenants.schema.json.

    Example: fairlane policy schema > tenants.schema.json
    """
    with needs("server"):
        from fairlane.gateway.policy.editor import schema_text
    typer.echo(schema_text(), nl=False)


def load_or_stop(file: str) -> Policy:
    """The policy, or every finding on standard error and the exit code that says which kind of trouble it is."""
    with needs("server"):
        from fairlane.config.source import UnreadableFile
        from fairlane.errors import ConfigError
    try:
        return _load(file)
    except UnreadableFile as error:
        stop(USAGE, str(error))
    except ConfigError as error:
        for finding in error.findings:
            typer.echo(finding, err=True)
        raise typer.Exit(FAILED) from None


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
