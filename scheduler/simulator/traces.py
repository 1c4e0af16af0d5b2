"""From a trace file to a workload. Which kind it is, its first line says; samples of each are in samples/.

Two kinds know no tenants. Their requests are dealt to CLIENTS clients: by chance, or so that a shared prefix stays together.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from fairlane.scheduler.simulator.errors import SimulationInputError
from fairlane.scheduler.simulator.servegen import RATE_COLUMNS, load_servegen
from fairlane.scheduler.simulator.trace_files import Row, csv_rows, json_rows, lines
from fairlane.scheduler.simulator.workload import SimRequest, Workload, in_order

SAMPLES = Path(__file__).parent / "samples"
CLIENTS = 8
TIER = "default"
DAY_S = 86_400.0
MAX_DURATION_S = 7 * DAY_S
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_ARENA = ("arrival_s", "tenant", "prompt_tokens", "output_tokens")


def load_trace(path: Path, seed: int = 0, duration_s: float | None = None, speed: float = 1.0) -> Workload:
    """The first duration_s seconds (default: all) of a trace that is replayed `speed` times as fast as it was recorded.

    seed: for what the trace leaves open. Raises SimulationInputError, one line that names file, line and what is allowed.
    """
    text = lines(path)
    header = tuple(text[0].split(","))
    if header[: len(RATE_COLUMNS)] == RATE_COLUMNS:
        workload = load_servegen(path, text, seed, duration_s, speed)
    else:
        workload = _replayed(_reader(path, text[0], header)(path, text, seed), duration_s, speed)
    if not workload.requests:
        raise SimulationInputError(f"{path}: has no requests" + ("" if duration_s is None else f" in its first {duration_s:g} s"))
    if workload.duration_s > MAX_DURATION_S:
        raise SimulationInputError(
            f"{path}: lasts {workload.duration_s / DAY_S:,.1f} days: at most {MAX_DURATION_S / DAY_S:g} can be simulated; "
            "--duration takes its beginning"
        )
    return workload


def _reader(path: Path, first: str, header: tuple[str, ...]) -> Callable[[Path, Sequence[str], int], Workload]:
    if header == _AZURE:
        return _azure
    if header == _ARENA:
        return _arena
    if first.startswith("{"):
        return _mooncake if '"input_length"' in first else _recorded
    raise SimulationInputError(
        f"{path}:1: is no trace of a known kind: a header {','.join(_AZURE)} or {','.join(_ARENA)} or {','.join(RATE_COLUMNS)}, "
        "or a JSON object a line, is needed"
    )


def _replayed(workload: Workload, duration_s: float | None, speed: float) -> Workload:
    if speed != 1.0:
        faster = tuple(replace(request, arrival_s=request.arrival_s / speed) for request in workload.requests)
        workload = replace(workload, requests=faster, duration_s=workload.duration_s / speed)
    return workload if duration_s is None else workload.first(duration_s)


def _workload(path: Path, requests: list[SimRequest], tiers: tuple[str, ...] = (TIER,), prefix_block: int = 512) -> Workload:
    ordered = in_order(requests)
    duration_s = ordered[-1].arrival_s + 1.0 if ordered else 1.0  # the last one counts, too
    return Workload(path.name, ordered, tiers, duration_s, prefix_block=prefix_block)


def _azure(path: Path, text: Sequence[str], seed: int) -> Workload:
    """Azure's LLM inference traces: a time stamp and two counts. Requests without output ended in an error: they count as 1."""
    random = Random(seed)  # noqa: S311 - deals out clients
    requests: list[SimRequest] = []
    start: datetime.datetime | None = None
    for row in csv_rows(path, text, _AZURE):
        try:
            time = datetime.datetime.fromisoformat(row.text("TIMESTAMP"))
        except ValueError:
            row.wrong("TIMESTAMP", "a time such as 2023-11-16 18:15:46.68 is needed")
        start = start or time
        if (time.tzinfo is None) != (start.tzinfo is None):
            row.wrong("TIMESTAMP", "times with and without an offset from UTC cannot be compared")
        arrival_s = (time - start).total_seconds()
        if arrival_s < 0:
            row.wrong("TIMESTAMP", f"is before the trace's first, {start}")
        output = max(1, row.count("GeneratedTokens", least=0))
        node = f"trace/client{random.randrange(CLIENTS)}"
        requests.append(SimRequest(arrival_s, node, TIER, row.prompt("ContextTokens"), output))
    return _workload(path, requests)


def _arena(path: Path, text: Sequence[str], seed: int) -> Workload:
    """The Arena log of the VTC authors: a client each."""
    return _workload(
        path,
        [
            SimRequest(
                row.number("arrival_s"),
                f"arena/{row.text('tenant')}",
                TIER,
                row.prompt("prompt_tokens"),
                row.count("output_tokens"),
            )
            for row in csv_rows(path, text, _ARENA)
        ],
    )


def _mooncake(path: Path, text: Sequence[str], seed: int) -> Workload:
    """Mooncake: milliseconds, lengths, and ids of 512-token blocks. Nearly all share the first block, so that the second says who
    belongs together."""
    requests = []
    for row in json_rows(path, text):
        prefix = row.ids("hash_ids")
        client = (prefix[1] if len(prefix) > 1 else 0) % CLIENTS
        prompt, output = row.prompt("input_length"), max(1, row.count("output_length", least=0))
        requests.append(SimRequest(row.number("timestamp") / 1000, f"trace/client{client}", TIER, prompt, output, prefix=prefix))
    return _workload(path, requests)


def _recorded(path: Path, text: Sequence[str], seed: int) -> Workload:
    """What Fairlane records of its own traffic (docs/simulator.md has the keys)."""
    requests, tiers, blocks = [], dict[str, None](), set[int]()
    for row in json_rows(path, text):
        tier = row.text("tier")
        tiers[tier] = None
        prefix = row.ids("prefix")
        if prefix:
            blocks.add(row.count("prefix_block"))
            if len(blocks) > 1:
                row.wrong("prefix_block", "the same is needed in every line")
        requests.append(
            SimRequest(
                row.number("arrival_s"),
                _node(row),
                tier,
                row.prompt("prompt_tokens"),
                row.count("output_tokens"),
                max_tokens=row.count("max_tokens") if row.has("max_tokens") else None,
                prefix=prefix,
                cancel_after_s=row.number("cancel_after_s") if row.has("cancel_after_s") else None,
                max_wait_s=row.number("max_wait_s") if row.has("max_wait_s") else None,
                deadline_s=row.number("deadline_s") if row.has("deadline_s") else None,
            )
        )
    return _workload(path, requests, tuple(tiers), blocks.pop() if blocks else 512)


def _node(row: Row) -> str:
    """An organisation may send requests of its own, as its tenants and their members do."""
    node = row.text("node")
    if not len(node.split("/")) <= 3 or not all(node.split("/")):
        row.wrong("node", "organisation, organisation/tenant or organisation/tenant/member is needed")
    return node
