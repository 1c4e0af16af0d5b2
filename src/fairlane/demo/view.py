"""The demo in a terminal: one screen that is drawn again and again, or plain lines where there is no terminal. It draws what the
board holds and decides nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fairlane.demo.board import Board, Lane, PhaseResult, Wait, quantile_of
from fairlane.demo.narrate import conclusions, sentence

COLOURS = ("gold1", "deep_sky_blue1", "grey62")
_BARS = "▁▂▃▄▅▆▇█"
_LONG_S = 2.0
# Sparklines are drawn on one logarithmic scale for all tiers and phases, or they could not be compared.
_SPARK_S = (0.1, 30.0)


@dataclass(frozen=True, slots=True)
class Scene:
    """What is on now. number of total phases; title: what to expect; policy_path: empty for somebody else's server."""

    number: int
    total: int
    title: str
    seconds: float
    policy_path: str


def spark(values: Sequence[float]) -> str:
    """One character a value, on a logarithmic scale."""
    low, high = (math.log(value) for value in _SPARK_S)
    marks = []
    for value in values:
        part = (math.log(min(max(value, _SPARK_S[0]), _SPARK_S[1])) - low) / (high - low)
        marks.append(_BARS[min(len(_BARS) - 1, int(part * len(_BARS)))])
    return "".join(marks)


def bar(share: float, cells: int) -> str:
    full = min(cells, round(share * cells))
    return "█" * full + "░" * (cells - full)


@dataclass(frozen=True, slots=True)
class Room:
    """What fits into a terminal of some width."""

    asks: bool
    kv_cells: int
    spark: int
    gap: int


def room(width: int) -> Room:
    if width >= 128:
        return Room(asks=True, kv_cells=10, spark=20, gap=2)
    if width >= 100:
        return Room(asks=False, kv_cells=10, spark=16, gap=2)
    return Room(asks=False, kv_cells=0, spark=14, gap=1)


def screen(scene: Scene, board: Board, now_s: float, done: Sequence[PhaseResult], width: int) -> RenderableType:
    """Everything, for one frame in a terminal of `width` columns."""
    parts: list[RenderableType] = [_now_table(board, now_s, room(width)), Text(""), _said(board, now_s)]
    if done:
        parts += [Text(""), _so_far(done)]
    parts += [Text(""), *_hint(scene, board)]
    title = f"[b]Fairlane demo[/b] · phase {scene.number} of {scene.total} · [b]{scene.title}[/b]"
    left = f"{max(0.0, scene.seconds - now_s):.0f} s left · Ctrl-C ends it"
    return Panel(Group(*parts), title=title, subtitle=left, padding=(1, 2 if width >= 100 else 1), width=min(width, 134))


def _now_table(board: Board, now_s: float, fits: Room) -> Table:
    table = Table(box=None, padding=(0, fits.gap, 0, 0))
    table.add_column("tier", no_wrap=True)
    if fits.asks:
        table.add_column("asks for", no_wrap=True)
    table.add_column("runs", justify="right", no_wrap=True)
    table.add_column("waits", justify="right", no_wrap=True)
    table.add_column("KV cache" if fits.kv_cells else "KV", justify="left" if fits.kv_cells else "right", no_wrap=True)
    for name in ("tokens/s", "evicted", "first token"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("lately", no_wrap=True)
    for lane, colour in zip(board.lanes, COLOURS, strict=False):
        table.add_row(*_row(board, lane, now_s, fits), style=colour)
    return table


def _row(board: Board, lane: Lane, now_s: float, fits: Room) -> list[str | Text]:
    share = board.kv_share(lane)
    waiting = Text(str(lane.waiting), style="bold red" if lane.longest_wait_s(now_s) > _LONG_S else "")
    cells = f"{bar(share or 0.0, fits.kv_cells)} " if fits.kv_cells else ""
    return [
        Text(lane.load.tier, style="bold"),
        *([lane.load.says] if fits.asks else []),
        str(lane.running),
        waiting,
        "?" if share is None else f"{cells}{share:4.0%}",
        f"{lane.rate(now_s):.0f}",
        str(lane.preemptions),
        _latest(lane, now_s),
        spark(lane.recent_ttfts_s(fits.spark)),
    ]


def _latest(lane: Lane, now_s: float) -> str:
    """The latest time to first token, or how long somebody has been waiting for one if that is already longer."""
    latest = lane.recent_ttfts_s(1)
    waited_s = lane.longest_wait_s(now_s)
    if waited_s > (latest[0] if latest else 0.3):
        return f"> {waited_s:.1f} s"
    return f"{latest[0]:.2f} s" if latest else "-"


def _said(board: Board, now_s: float) -> Text:
    return Text.assemble(("Now: ", "bold"), sentence(board, now_s))


def _hint(scene: Scene, board: Board) -> list[Text]:
    force = Text(f"Policy in force: generation {board.generation}, tiers: {board.tiers}", style="dim")
    if not scene.policy_path:
        return [force]
    if board.file_is_bad:
        bad = f"That file has a mistake, so the old policy stays. What is wrong: fairlane policy check {scene.policy_path}"
        return [force, Text(bad, style="bold red")]
    return [force, Text.assemble(("Change it while this runs: edit  ", "dim"), scene.policy_path)]


def _so_far(results: Sequence[PhaseResult]) -> Table:
    """Phases that are over: median time to first token and tokens a second."""
    table = Table(box=None, padding=(0, 3, 0, 0))
    table.add_column("before this", no_wrap=True)
    for tier, colour in zip(results[0].tiers, COLOURS, strict=False):
        table.add_column(tier.tier, style=colour, no_wrap=True)
    for result in results:
        cells = [f"{_wait(tier.ttft_s(0.5))}, {tier.tokens / result.seconds:.0f} tok/s" for tier in result.tiers]
        table.add_row(result.policy.upper(), *cells)
    return table


def results_table(results: Sequence[PhaseResult]) -> Table:
    """Everything measured, a line for each policy and tier."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    table.add_column("tier", no_wrap=True)
    for name in ("requests", "TTFT p50", "TTFT p95", "tokens/s", "share", "evicted", "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        total = sum(tier.tokens for tier in result.tiers) or 1
        for tier, colour in zip(result.tiers, COLOURS, strict=False):
            table.add_row(
                result.policy.upper() if tier is result.tiers[0] else "",
                tier.tier,
                str(len(tier.points)),
                _wait(tier.ttft_s(0.5)),
                _wait(tier.ttft_s(0.95)),
                f"{tier.tokens / result.seconds:.0f}",
                f"{tier.tokens / total:.0%}",
                str(tier.preemptions),
                str(tier.errors),
                style=colour,
                end_section=tier is result.tiers[-1],
            )
    return table


def ending(results: Sequence[PhaseResult]) -> RenderableType:
    """What is left on the screen: the table and what it says."""
    lines = [Text(line) for line in conclusions(results)]
    return Group(Text(""), results_table(results), Text(""), *lines, Text(""))


def _wait(wait: Wait | None) -> str:
    return "-" if wait is None else str(wait)


def plain_line(scene: Scene, board: Board, now_s: float) -> str:
    """One moment as one line, for files and pipes."""
    parts = []
    for lane in board.lanes:
        share = board.kv_share(lane)
        kv = "?" if share is None else f"{share:.0%}"
        ttft = quantile_of(lane.points(now_s), 0.5)
        parts.append(
            f"{lane.load.tier}: {lane.running} run, {lane.waiting} wait, KV {kv}, {lane.rate(now_s):.0f} tok/s,"
            f" TTFT p50 {_wait(ttft)}, {lane.preemptions} evicted"
        )
    return f"[{scene.number}/{scene.total} {board.tiers or '?'} {now_s:4.0f} s] " + " | ".join(parts)
