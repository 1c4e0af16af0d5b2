"""What the client commands share: which server, which key, and how a refusal reads. Keys come from the environment or a file,
never from the command line, where every user of the machine could see them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fairlane.cli.exits import FAILED, USAGE, stop
from fairlane.cli.target import is_local

KEY_VARIABLE = "FAIRLANE_API_KEY"
ADMIN_KEY_VARIABLE = "FAIRLANE_ADMIN_KEY"

Target = Annotated[str, typer.Option(envvar="FAIRLANE_TARGET", metavar="HOST:PORT", help="The server's inference address.")]
KeyFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help=f"File that holds the API key. Default: ${KEY_VARIABLE}, then the demo keys.")
]
Tenant = Annotated[
    str | None, typer.Option(metavar="ORG/TENANT", help="Whose demo key to use. Default: the first tenant of the policy.")
]
StateDir = Annotated[
    Path | None,
    typer.Option(envvar="FAIRLANE_STATE_DIR", metavar="DIR", help="Where the server keeps its demo keys and what it records."),
]
DEFAULT_TARGET = "127.0.0.1:50051"


def api_key(target: str, key_file: Path | None, tenant: str | None, state_dir: Path | None) -> str:
    """The key to call `target` with. Ends the command if there is none."""
    if key_file is not None:
        return _key_in(key_file)
    value = os.environ.get(KEY_VARIABLE, "").strip()
    if value and tenant is None:
        return _checked(value, KEY_VARIABLE)
    _, tenants = _demo_keys(target, state_dir, KEY_VARIABLE)
    if tenant is None and tenants:
        return next(iter(tenants.values()))
    if tenant in tenants:
        return tenants[tenant]
    stop(USAGE, f"there is no demo key for {tenant or 'any tenant'}; there is: {', '.join(tenants) or 'none'}")


def admin_key(target: str, state_dir: Path | None) -> str:
    """The admin key to call `target` with. Ends the command if there is none."""
    value = os.environ.get(ADMIN_KEY_VARIABLE, "").strip()
    return _checked(value, ADMIN_KEY_VARIABLE) if value else _demo_keys(target, state_dir, ADMIN_KEY_VARIABLE)[0]


def _key_in(path: Path) -> str:
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        stop(USAGE, f"cannot read the key file {path}: {getattr(error, 'strerror', None) or 'not a text'}")
    return _checked(key, str(path))


def _checked(key: str, where: str) -> str:
    if not key or len(key) > 512 or not key.isascii() or not key.isprintable() or " " in key:
        stop(USAGE, f"{where} does not hold an API key: one line of letters and digits is needed")
    return key


def _demo_keys(target: str, state_dir: Path | None, variable: str) -> tuple[str, dict[str, str]]:
    from fairlane.errors import ConfigError
    from fairlane.gateway.keys import DEMO_FILE, read_demo_file
    from fairlane.paths import state_dir as default_state_dir

    give = f"set {variable}" + (" or give --key-file" if variable == KEY_VARIABLE else "")
    if not is_local(target):  # they would be of no use there, and somebody else would have them
        stop(USAGE, f"no key for {target}: {give}; demo keys are for servers on this machine")
    path = (state_dir or default_state_dir()) / DEMO_FILE
    if not path.exists():
        start = "or start a server on this machine with `fairlane serve`"
        stop(USAGE, f"no key: {give}, {start}; if one runs, --state-dir must be its own: there are no demo keys in {path.parent}")
    try:
        return read_demo_file(path)
    except ConfigError as error:
        stop(USAGE, str(error))


def metadata(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


@contextmanager
def connect(target: str, variable: str = KEY_VARIABLE) -> Iterator[Any]:
    """A channel to the server; refusals inside end the command with one line."""
    import grpc

    if not target.isascii() or not target.isprintable() or not target or " " in target:
        stop(USAGE, f"{target!a} is no address: HOST:PORT is needed")
    options = [("grpc.max_receive_message_length", 64 << 20)]
    if is_local(target):
        options.append(("grpc.enable_http_proxy", 0))  # a proxy would be another machine, and get the key
    else:
        typer.echo(f"fairlane: warning: the connection to {target} is not encrypted", err=True)
    with grpc.insecure_channel(target, options=options) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            stop(FAILED, explain(error, target, variable))


def explain(error: Any, target: str, variable: str = KEY_VARIABLE) -> str:
    """A refusal in words: the server's message, its stable reason, every bad field, and what to do.
    variable: where its key may have come from."""
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    code, text = error.code().name, error.details() or "no details"
    reason, lines = "", []
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # details that do not belong to this status
        status = None
    for detail in status.details if status else ():
        info, request, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(request):
            lines = [f"  {violation.field}: {violation.description}" for violation in request.field_violations]
        elif detail.Unpack(retry):
            lines.append(f"  try again in {retry.retry_delay.ToTimedelta().total_seconds():.1f} s")
    if not reason and code == "UNAVAILABLE" and ("DNS" in text or "resol" in text):
        return f"cannot find the host of {target}: is its name right?"
    if not reason and code == "UNAVAILABLE" and "connect" not in text:
        return f"the connection to {target} was lost: {text}"
    if not reason and code == "UNAVAILABLE":
        return f"cannot reach a server at {target}: start one with `fairlane serve`, or give --target HOST:PORT"
    if code == "UNAUTHENTICATED":
        wanted = f"{KEY_VARIABLE} or --key-file" if variable == KEY_VARIABLE else variable
        lines.append(f"  is {wanted} right? Demo keys work only on the server's own machine")
    more = [line for line in lines if line.strip() != text]  # a single bad field is the message, too
    return "\n".join([f"{code if reason in ('', code) else f'{code} {reason}'}: {text}", *more])
