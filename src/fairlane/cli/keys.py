"""`fairlane keys`: make an API key, which is shown once and stored nowhere (the policy file gets its hash), or revoke one."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Annotated

import typer

from fairlane.cli import admin, client
from fairlane.cli.exits import USAGE, stop

# What the policy takes as a key's id (gateway/policy/schema.py).
_ID = r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}"

app = typer.Typer(no_args_is_help=True, help="Make and revoke API keys.")

Key = Annotated[str, typer.Argument(metavar="KEY", help="Its id in the policy (in the server's logs too), or its hash.")]


@app.callback()
def keys() -> None:
    """Make and revoke API keys."""


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

    if key_id and not re.fullmatch(_ID, key_id):
        stop(USAGE, f"--id {key_id!a}: the policy allows a name of up to 63 letters, digits, - and _")
    try:
        pepper = load_or_create_pepper(state_dir or default_state_dir())
    except (ConfigError, OSError) as error:
        stop(USAGE, str(error))
    key = new_key()
    typer.echo("Keep the key below safe: it is not stored. In the policy, under the tenant's keys:", err=True)
    typer.echo(f'  - id: {key_id or f"k-{secrets.token_hex(3)}"}\n    hash: "{hash_key(pepper, key)}"', err=True)
    typer.echo(key)


@app.command()
def revoke(
    key: Key,
    abort: admin.Abort = False,
    for_: admin.For = None,
    target: admin.Target = admin.DEFAULT_TARGET,
    state_dir: client.StateDir = None,
) -> None:
    """Refuse a key from now on, whatever the policy file says, and over restarts. Take it out of the file next.

    Example: fairlane keys revoke checkout-1 --abort
    """
    from fairlane.protos.fairlane.v1 import admin_pb2 as pb

    request = pb.RevokeKeyRequest(key=key, abort=abort, duration=admin.duration(for_))
    admin.say_overridden("revoked", admin.call(target, state_dir, "RevokeKey", request))


@app.command()
def restore(key: Key, target: admin.Target = admin.DEFAULT_TARGET, state_dir: client.StateDir = None) -> None:
    """Accept a revoked key again.

    Example: fairlane keys restore checkout-1
    """
    from fairlane.protos.fairlane.v1 import admin_pb2 as pb

    admin.say_lifted(key, "restored", admin.call(target, state_dir, "RestoreKey", pb.RestoreKeyRequest(key=key)))
