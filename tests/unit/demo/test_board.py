"""The demo's arithmetic: what events make of a board, quantiles with requests that never got their token, results."""

from __future__ import annotations

import pytest

from fairlane.demo.board import Ask, Board, Point, Stage, Wait, new_board, quantile_of, result_of
from fairlane.demo.narrate import conclusions, sentence
from fairlane.demo.scenario import LOADS
from fairlane.demo.traffic import note
from fairlane.protos.fairlane.v1 import inference_pb2 as pb

QUEUED = pb.GenerateEvent(queued=pb.Queued())
STARTED = pb.GenerateEvent(started=pb.Started())
TOKENS = pb.GenerateEvent(tokens=pb.Tokens(num_tokens=3))
EVICTED = pb.GenerateEvent(preempted=pb.Preempted(kind=pb.PREEMPTION_KIND_RECOMPUTED))
PAUSED = pb.GenerateEvent(preempted=pb.Preempted(kind=pb.PREEMPTION_KIND_PAUSED))
RESUMED = pb.GenerateEvent(resumed=pb.Resumed())
FINISHED = pb.GenerateEvent(finished=pb.Finished())


@pytest.fixture
def board() -> Board:
    return new_board(LOADS)


def test_a_requests_events_move_it_through_its_stages(board: Board) -> None:
    lane, ask = board.lane("batch"), Ask(sent_s=1.0)
    lane.asks.append(ask)
    stages = [ask.stage]
    for at_s, event in enumerate((QUEUED, STARTED, TOKENS, PAUSED, EVICTED, RESUMED, TOKENS, FINISHED), 2):
        note(lane, ask, event, float(at_s))
        stages.append(ask.stage)
    assert stages == [
        Stage.SENT, Stage.WAITING, Stage.RUNNING, Stage.RUNNING, Stage.RUNNING, Stage.WAITING, Stage.RUNNING, Stage.RUNNING,
        Stage.OVER,
    ]  # fmt: skip
    assert (ask.first_s, ask.tokens, lane.preemptions, lane.tokens) == (4.0, 6, 1, [(4.0, 3), (8.0, 3)])


def test_rates_look_back_over_a_window(board: Board) -> None:
    lane = board.lane("gold")
    lane.tokens = [(1.0, 100), (7.5, 6), (9.0, 3)]
    assert lane.rate(10.0, window_s=3.0) == 3.0


def test_shares_are_unknown_until_the_server_tells(board: Board) -> None:
    lane = board.lane("gold")
    unknown = board.kv_share(lane)
    board.blocks, lane.kv_blocks = 56, 14
    assert (unknown, board.kv_share(lane)) == (None, 0.25)


def points(*waits: float, still: tuple[float, ...] = ()) -> tuple[Point, ...]:
    return (*(Point(0, wait, False) for wait in waits), *(Point(0, wait, True) for wait in still))


@pytest.mark.parametrize(
    ("of", "quantile", "wait"),
    [
        (points(), 0.5, None),
        (points(1, 2, 3, 4), 0.5, Wait(2)),
        (points(1, 2, 3, 4), 0.95, Wait(4)),
        # Two of four have waited 5 s and have nothing: half are served within 2 s, nobody knows when 95% are.
        (points(1, 2, still=(5, 5)), 0.5, Wait(2)),
        (points(1, 2, still=(5, 5)), 0.95, Wait(5, at_least=True)),
        # Sent just before the end: it says nothing about the others, who are 3/4 and then 2/4 of what is left.
        (points(1, 2, 3, still=(0.1,)), 0.5, Wait(2)),
        (points(still=(4,)), 0.5, Wait(4, at_least=True)),
    ],
)
def test_quantiles_count_who_is_still_waiting_as_waiting_longer(
    of: tuple[Point, ...], quantile: float, wait: Wait | None
) -> None:
    assert quantile_of(of, quantile) == wait


def test_a_result_has_every_request_that_did_not_fail(board: Board) -> None:
    lane = board.lane("gold")
    lane.asks = [
        Ask(1.0, Stage.OVER, first_s=1.5),
        Ask(2.0, Stage.WAITING),
        Ask(3.0, Stage.OVER),  # refused
    ]
    lane.tokens = [(1.5, 2), (1.9, 3), (9.99, 5), (10.2, 7)]
    lane.errors = 1
    tier = result_of(board, "vip", "VIP", 10.0).tier("gold")
    assert tier.points == (Point(1.0, 0.5, False), Point(2.0, 8.0, True))
    assert (tier.rates, tier.tokens, tier.errors) == ((0, 5, 0, 0, 0, 0, 0, 0, 0, 12), 17, 1)


def test_under_fcfs_the_sentence_says_who_waits_and_why(board: Board) -> None:
    board.tiers = "fcfs"
    board.lane("gold").asks.append(Ask(1.0, Stage.WAITING))
    assert sentence(board, 7.0) == "gold has waited for 6 s, because batch came first, and keeps coming"


def test_under_vip_the_sentence_says_whose_blocks_were_taken(board: Board) -> None:
    board.tiers = "vip"
    board.lane("gold").asks.append(Ask(1.0, Stage.RUNNING, first_s=1.2))
    board.lane("batch").last_preempted_s = 1.1
    assert sentence(board, 2.0) == (
        "gold took KV blocks from batch: those streams stop, wait, and go on with the very next token"
    )


def test_under_fair_the_sentence_gives_the_shares(board: Board) -> None:
    board.tiers = "fair"
    for tier, tokens in (("gold", 60), ("standard", 30), ("batch", 10)):
        board.lane(tier).asks.append(Ask(0.0, Stage.RUNNING, first_s=0.5))
        board.lane(tier).tokens.append((9.0, tokens))
    assert "gold 60%, standard 30%, batch 10%" in sentence(board, 10.0)


def test_conclusions_compare_with_the_first_phase() -> None:
    results = []
    for policy, first_s in (("fcfs", 4.0), ("vip", 0.5)):
        board = new_board(LOADS)
        for lane in board.lanes:
            lane.asks.append(Ask(0.0, Stage.OVER, first_s=first_s))
            lane.tokens = [(second + 0.5, 1) for second in range(4)]
        results.append(result_of(board, policy, policy, 5.0))
    assert conclusions(results) == [
        "FCFS a first token takes gold 4.00 s, standard 4.00 s, batch 4.00 s (median)",
        "VIP  gold after 0.50 s instead of 4.00 s (8 times sooner); standard mostly within 0.50 s (p95); "
        "batch stood still for 1 of 5 s",
    ]
