"""When a worker counts as lost: silence, a step that does not end, work without steps; and when it does not."""

from __future__ import annotations

from fairlane.gateway.liveness import Liveness
from fairlane.protos.fairlane.v1 import worker_pb2 as pb

TIMEOUT, INTERVAL = 5.0, 1.0


def pong(**fields: float) -> pb.FromWorker:
    return pb.FromWorker(pong=pb.Pong(**fields))  # type: ignore[arg-type]


def verdicts(seconds: int, said: dict[int, pb.FromWorker]) -> list[str | None]:
    """Checks once a second from 1 on; `said` maps seconds to what the worker says just before the check."""
    liveness, found = Liveness(0.0, TIMEOUT, INTERVAL), []
    for now in range(1, seconds + 1):
        if now in said:
            liveness.heard(said[now], now)
        found.append(liveness.verdict(now))
    return found


def test_silence_longer_than_the_timeout_is_loss() -> None:
    found = verdicts(6, {})
    assert found == [None] * 5 + ["silent for 6.0 s"]


def test_an_idle_worker_that_answers_is_alive_for_ever() -> None:
    found = verdicts(60, {second: pong(step_id=7) for second in range(1, 61)})
    assert set(found) == {None}


def test_a_busy_worker_whose_steps_advance_is_alive() -> None:
    found = verdicts(60, {second: pong(step_id=second, running=3) for second in range(1, 61)})
    assert set(found) == {None}


def test_waiting_requests_without_a_new_step_are_loss() -> None:
    found = verdicts(8, {second: pong(step_id=7, waiting=1) for second in range(1, 9)})
    # The first pong, at 1, is the last sign of progress.
    assert found[:6] == [None] * 6
    assert found[6] == "has work but no new step for 6.0 s"


def test_work_that_arrives_after_a_long_idle_time_has_the_whole_timeout() -> None:
    said = {second: pong(step_id=7) for second in range(1, 20)}
    said |= {second: pong(step_id=7, running=1) for second in range(20, 25)}
    assert set(verdicts(24, said)) == {None}


def test_one_step_longer_than_the_timeout_is_loss_and_its_end_clears_it() -> None:
    stuck = verdicts(2, {1: pong(step_id=7, running=1, step_running_s=4.9), 2: pong(step_id=7, running=1, step_running_s=5.1)})
    ended = pb.FromWorker(deltas=pb.StepDeltas(step_id=8))
    liveness = Liveness(0.0, TIMEOUT, INTERVAL)
    liveness.heard(pong(step_id=7, running=1, step_running_s=5.1), 1.0)
    liveness.heard(ended, 1.0)
    assert stuck == [None, "one step has been running for 5.1 s"]
    assert liveness.verdict(1.0) is None


def test_our_own_standstill_is_not_the_workers_silence() -> None:
    liveness = Liveness(0.0, TIMEOUT, INTERVAL)
    assert liveness.verdict(1.0) is None
    # This process was suspended for an hour: what the worker said lies unread.
    assert liveness.verdict(3601.0) is None
    found = [liveness.verdict(3601.0 + second) for second in range(1, 7)]
    assert found[-1] is not None
