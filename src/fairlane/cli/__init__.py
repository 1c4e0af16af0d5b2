"""The `fairlane` command: which sub-commands there are. What each does is in its own module, and what it needs (grpc, yaml,
torch) is imported only when it runs, so that `fairlane --help` is instant and the client works without the server's extras.

Exit codes: 0 done; 1 it was tried and failed or was refused; 2 used wrongly: a bad flag, variable, file or model, or no key;
3 there are differences, for commands that are asked to say so; 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from fairlane import __version__
from fairlane.cli import (
    bench,
    calibrate,
    chat,
    demo,
    generate,
    keys,
    model,
    policy,
    policy_admin,
    policy_plan,
    policy_shadow,
    policy_simulate,
    profile,
    requests,
    serve,
    status,
    tenants,
    tiers,
    trace,
)

# The C core's own messages mean nothing to a user; what goes wrong is said in our words. Must be set before grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

app = typer.Typer(
    name="fairlane",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,  # locals hold keys and prompts
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fairlane {__version__}")
        raise typer.Exit()


@app.callback(epilog="Exit codes: 0 done, 1 failed or refused, 2 used wrongly, 130 interrupted.")
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fairlane: multi-tenant, priority-scheduling LLM inference.

    First steps: **fairlane model pull**, **fairlane serve**, and in another terminal **fairlane generate "Hello"**.
    """
    # What a terminal's encoding lacks is written as an escape: an answer must not end in the middle because of an emoji.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


app.command("serve")(serve.serve)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("status")(status.status)
app.command("demo")(demo.demo)
app.command("bench")(bench.bench)
app.command("profile")(profile.profile)
app.command("calibrate")(calibrate.calibrate)
app.add_typer(model.app, name="model")
policy_admin.mount(policy.app)
policy.app.command("plan")(policy_plan.plan)
policy_simulate.mount(policy.app)
policy.app.command("shadow")(policy_shadow.shadow)
app.add_typer(policy.app, name="policy")
app.add_typer(tenants.app, name="tenants")
app.add_typer(tiers.app, name="tiers")
app.add_typer(requests.app, name="requests")
app.add_typer(keys.app, name="keys")
app.add_typer(trace.app, name="trace")
