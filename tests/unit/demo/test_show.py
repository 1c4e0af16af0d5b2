"""What the demo draws and reads: frames at every width, plain lines, the picture, a server's figures, flags."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fairlane.cli import app
from fairlane.demo import figures
from fairlane.demo.board import Ask, Board, Stage, new_board, result_of
from fairlane.demo.picture import draw
from fairlane.demo.scenario import LOADS
from fairlane.demo.view import Scene, bar, ending, plain_line, screen, spark

SCENE = Scene(2, 3, "VIP: gold goes first", 25.0, "/tmp/fairlane-demo-x/tenants.yaml")
METRICS = """\
# HELP fairlane_kv_blocks KV blocks by what they hold.
fairlane_kv_blocks{state="used"} 40.0
fairlane_kv_blocks{state="cached"} 4.0
fairlane_kv_blocks{state="free"} 12.0
fairlane_kv_blocks_by_domain{domain="tenant:chatly/free"} 30.0
fairlane_kv_blocks_by_domain{domain="other"} 10.0
fairlane_policy_generation 3.0
fairlane_policy_info{sha256="abc123",tiers="vip"} 1.0
fairlane_generation_tokens_total{tenant="chatly/free",tier="batch"} 7.0
"""


def busy() -> Board:
    board = new_board(LOADS)
    board.blocks, board.generation, board.tiers = 56, 2, "vip"
    for number, lane in enumerate(board.lanes):
        lane.kv_blocks = 14
        lane.asks = [Ask(float(i), Stage.OVER, first_s=i + 0.2 * (number + 1)) for i in range(20)] + [Ask(20.0, Stage.WAITING)]
        lane.tokens = [(ask.sent_s + 0.5, 10) for ask in lane.asks]
    return board


def rendered(thing: object, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(thing)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 128, 200])
def test_a_frame_fits_its_terminal_and_nothing_is_cut_off(width: int) -> None:
    board = busy()
    lines = rendered(screen(SCENE, board, 24.0, [result_of(board, "fcfs", "FCFS", 25.0)], width), width)
    text = "\n".join(lines)
    assert (max(map(len, lines)) <= width, "…" in text) == (True, False)
    assert all(word in text for word in ("standard", "generation 2, tiers: vip", "25%", SCENE.policy_path, "Now: "))


def test_the_summary_fits_eighty_columns() -> None:
    board = busy()
    results = [result_of(board, name, name, 25.0) for name in ("fcfs", "vip", "fair")]
    lines = rendered(ending(results), 80)
    assert (max(map(len, lines)) <= 80, "…" in "\n".join(lines)) == (True, False)


def test_a_plain_line_is_one_line_without_codes() -> None:
    line = plain_line(SCENE, busy(), 24.0)
    assert line.startswith("[2/3 vip   24 s] gold: 0 run, 1 wait, KV 25%")
    assert line.isprintable()


def test_sparks_and_bars() -> None:
    assert (spark([0.01, 0.1, 30, 99]), bar(0.5, 4), bar(2.0, 4)) == ("▁▁██", "██░░", "████")


def test_figures_are_read_from_prometheus_text() -> None:
    found = figures.parse(METRICS)
    assert found == figures.Figures(56, {"chatly/free": 30, "other": 10}, 3, "vip", "abc123")


def test_kv_shares_are_unknown_where_domains_are_not_told_apart() -> None:
    board = new_board(LOADS)
    figures.show(figures.Figures(56, {"chatly/free": 28}, 1, "vip", "a"), board)
    told = [board.kv_share(lane) for lane in board.lanes]
    figures.show(figures.Figures(56, {"other": 28}, 1, "vip", "a"), board)
    assert (told, [board.kv_share(lane) for lane in board.lanes]) == ([0, 0, 0.5], [None, None, None])


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    board = busy()
    results = [result_of(board, name, name, 25.0) for name in ("fcfs", "vip", "fair")]
    draw(results, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("flags", [["--policies", "vip,fcsf"], ["--policies", ","], ["--picture", "/nowhere/at/all.png"]])
def test_wrong_flags_are_named_before_anything_starts(flags: list[str]) -> None:
    result = CliRunner().invoke(app, ["demo", *flags])
    assert (result.exit_code, flags[0] in result.output) == (2, True)
