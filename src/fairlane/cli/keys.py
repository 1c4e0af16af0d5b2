"""`fairlane keys`: make an API key. The key is shown once and stored nowhere; the policy file gets its hash."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from fairlane.cli.exits import USAGE, stop

app = typer.Typer(no_args_is_help=True, help="Make API keys.")


@app.callback()
def keys() -> None:
    """Make API keys."""


@app.command()
def new(
    key_id: Annotated[str, typer.Option("--id", metavar="ID", help="Its name in the policy and in logs.")] = "",
    state_dir: Annotated[
        Path | None, typer.Option(envvar="FAIRLANE_STATE_DIR", metavar="DIR", help="Where the server keeps its pepper.")
    ] = None,
) -> None:
    """Make a key. It goes to standard output, once; the entry for the policy file goes to standard error.

    Run it where the server runs, or with a copy of its pepper: a hash is valid for one pepper.

    Example: fairlane keys new --id checkout-1 > checkout.key
    """
    from fairlane.errors import ConfigError
    from fairlane.gateway.keys import hash_key, load_or_create_pepper, new_key
    from fairlane.paths import state_dir as default_state_dir

    try:
        pepper = load_or_create_pepper(state_dir or default_state_dir())
    except (ConfigError, OSError) as error:
        stop(USAGE, str(error))
    key = new_key()
    typer.echo("Keep the key below safe: it is not stored. In the policy, under the tenant's keys:", err=True)
    typer.echo(f'  - id: {key_id or f"k-{secrets.token_hex(3)}"}\n    hash: "{hash_key(pepper, key)}"', err=True)
    typer.echo(key)
