"""What `fairlane bench` shows: a bar while a load runs, and at the end one table with a line a load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fairlane.bench.figures import Row

_COLUMNS = (  # key, two lines of heading, format
    ("requests", "requests", "", ",d"),
    ("prompt_tokens", "prompt", "tokens", ",d"),
    ("output_tokens", "output", "tokens", ",d"),
    ("wall_s", "seconds", "", ",.2f"),
    ("out_tok_s", "output", "tokens/s", ",.1f"),
    ("req_s", "requests", "/s", ",.2f"),
    ("ttft_p50_ms", "TTFT ms", "p50", ",.1f"),
    ("ttft_p99_ms", "TTFT ms", "p99", ",.1f"),
    ("tpot_p50_ms", "TPOT ms", "p50", ",.2f"),
    ("tpot_p99_ms", "TPOT ms", "p99", ",.2f"),
    ("decoding_tok_s", "all decoding", "tokens/s", ",.1f"),
)
LEGEND = (
    "All requests of a load are submitted at once. TTFT: from then to a request's first token. TPOT: of a request, the mean time "
    "per token after its first. All decoding: the rate between the last first token and the first end (-: there is no such time)."
)
_WIDTH = 150  # where the output is no terminal


def output_console(*, to_file: bool) -> Console:
    return Console(width=_WIDTH if to_file else None, highlight=False)


def table(rows: Sequence[Row]) -> Table:
    """One line a load; what a load has no figure of is a dash."""
    drawn = Table(title=None, caption=LEGEND, caption_justify="left", caption_style="dim")
    drawn.add_column("load", no_wrap=True)
    for _, first, second, _ in _COLUMNS:
        drawn.add_column(f"{first}\n{second}", justify="right", no_wrap=True)
    for row in rows:
        drawn.add_row(str(row["load"]), *(_text(row.get(key), form) for key, _, _, form in _COLUMNS))
    return drawn


def _text(value: object, form: str) -> str:
    return "-" if value is None else format(value, form)


@contextmanager
def progress_bar(name: str, total: int, console: Console) -> Iterator[Callable[[int], None]]:
    """A bar of `total` output tokens for as long as the block lasts; nothing where the console is no terminal. What it yields is
    told how many there are."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("output tokens"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done: bar.update(task, completed=done)
