"""The step log: what is a step's time and what is not, that it stays bounded and never costs a step, and that it is read back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from fairlane.calibrate.recorded import read_step_log
from fairlane.clock import FakeClock
from fairlane.protos.fairlane.v1 import worker_pb2 as pb
from fairlane.scheduler.engine import Command
from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.fake_executor import FakeExecutor, StepTime
from fairlane.scheduler.output import NewSequence, ScheduledSequence, ScheduleOutput
from fairlane.scheduler.simulator.errors import SimulationInputError
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.step_work import StepWork
from fairlane.worker.__main__ import build_engine
from fairlane.worker.boxes import Connection, Received, WorkerBoxes
from fairlane.worker.config import WorkerConfig
from fairlane.worker.step_log import LoggedExecutor, StepLog, older, open_step_log

INFO = ExecutorInfo("tiny", 97, 256, 4, 10, (2,))
SHAPE = WorkerShape(num_blocks=9, block_size=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=256)
HEADER = SHAPE.document({"model": "tiny"})
WORK = StepWork(1, 3, 0, 4.5)


class Inbox:
    """Nothing comes, after a while if somebody waits for it."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    def drain(self, timeout_s: float | None) -> Iterable[Command]:
        self.clock.advance(100.0 if timeout_s is None else 0.25)
        return []


def test_a_step_takes_from_the_end_of_the_one_before_or_from_when_the_engine_woke(tmp_path: Path) -> None:
    clock = FakeClock(50.0)
    inner = FakeExecutor(INFO, clock, step_time=StepTime(1.0, 0, 0, 0))
    log = StepLog(tmp_path / "steps", HEADER)
    logged = LoggedExecutor(inner, Inbox(clock), clock, log)
    prompt = ScheduleOutput(1, new=[NewSequence(0, [1, 2, 3], 3, [[1, 2]], {})], scheduled=[ScheduledSequence(0, 0, 3, True)])
    logged.drain(None)  # idle
    logged.result(logged.launch(prompt))
    logged.drain(0.0)  # a busy engine's look into its inbox is part of its next step
    logged.result(logged.launch(ScheduleOutput(2, decode_slots=[0])))
    logged.drain(None)
    logged.result(logged.launch(ScheduleOutput(3, decode_slots=[0])))
    log.close()
    found = read_step_log(tmp_path / "steps", older(tmp_path / "steps"))
    assert found.steps == [
        (StepWork(1, 3, 0, 4), pytest.approx(1.0)),  # scores are written as whole numbers
        (StepWork(1, 1, 3, 0), pytest.approx(1.25)),
        (StepWork(1, 1, 4, 0), pytest.approx(1.0)),
    ]


def test_the_log_says_what_the_worker_is(tmp_path: Path) -> None:
    config = WorkerConfig(step_log=str(tmp_path / "steps"), max_num_seqs=2, max_num_batched_tokens=8, pipeline_depth=1)
    log = open_step_log(config, INFO)
    assert log is not None
    log.write(WORK, 0.5)
    found = read_step_log(tmp_path / "steps", tmp_path / "none")
    limits = {"max_num_seqs": 2, "max_num_resident": 256, "max_num_batched_tokens": 8, "max_model_len": 256}
    expected = WorkerShape(num_blocks=9, block_size=4, depth=1, prefix_caching=True, **limits)
    assert (found.shape, found.about) == (expected, {"model": "tiny", "device": "cpu"})


class Sink:
    def send(self, message: pb.FromWorker) -> None:
        """Nobody listens."""


def test_a_worker_writes_down_every_step_of_its_engine(tmp_path: Path) -> None:
    path, clock = tmp_path / "steps", FakeClock()
    boxes, connection = WorkerBoxes(INFO.vocab_size, clock), Connection(Sink())
    log = StepLog(path, HEADER)
    engine = build_engine(WorkerConfig(), FakeExecutor(INFO, clock), boxes, clock, log)
    tiers = [pb.TierSpec(name="t", priority=1, weight=1, shaping="off")]
    asked = pb.Add(
        request_id=1,
        tenant="o/t",
        tier="t",
        prompt_token_ids=[5, 6, 7],
        max_tokens=4,
        cache_mode="none",
        sampling=pb.WorkerSampling(temperature=0, top_p=1, repetition_penalty=1),
    )
    policy = pb.PolicySnapshot(generation=1, sha256="a", tiers_policy="fcfs", tiers=tiers)
    for message in (pb.ToWorker(policy=policy), pb.ToWorker(add=asked)):
        boxes.put_item(Received(connection, message))
    while engine.turn(wait=False):
        pass
    log.close()
    work = [work for work, _ in read_step_log(path, older(path)).steps]
    assert work == [StepWork(1, 3, 0, 4), StepWork(1, 1, 3, 0), StepWork(1, 1, 4, 0), StepWork(1, 1, 5, 0)]


def test_a_full_file_becomes_the_older_one_and_both_are_read(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    log = StepLog(path, HEADER, lines=3)
    for number in range(8):
        log.write(WORK, float(number))
    log.close()
    times = [seconds for _, seconds in read_step_log(path, older(path)).steps]
    assert (times, len(path.read_text().splitlines())) == ([3, 4, 5, 6, 7], 3)


def test_steps_of_another_worker_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    for number, header in enumerate((HEADER, HEADER | {"num_blocks": 77})):
        log = StepLog(path, header)
        log.write(WORK, float(number))
        log.close()
    assert [seconds for _, seconds in read_step_log(path, older(path)).steps] == [1.0]


def test_a_disk_that_takes_no_more_ends_the_log_and_no_step(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "steps"
    path.parent.mkdir()
    log = StepLog(path, HEADER, lines=1)
    log.write(WORK, 1.0)
    path.unlink()
    path.parent.rmdir()
    for _ in range(3):
        log.write(WORK, 2.0)
    log.close()
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_said_before_anything_is_served(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step_log: .*/no/steps: cannot be written: No such file"):
        open_step_log(WorkerConfig(step_log=str(tmp_path / "no" / "steps")), INFO)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", ":1: is no step log"),
        ("hello\n", ":1: is no step log"),
        (json.dumps(HEADER) + "\n", "holds no steps yet"),
        (json.dumps(HEADER) + "\n[1,2,3,4,5,6]\n[1,2]\n", ":3: is no step"),
        (json.dumps(HEADER | {"num_blocks": 0}) + "\n[1,2,3,4,5,6]\n", ":1: num_blocks: 0"),
    ],
)
def test_what_is_no_step_log_is_one_line_with_its_place(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "steps"
    file.write_text(text)
    with pytest.raises(SimulationInputError) as error:
        read_step_log(file, older(file))
    assert (str(error.value).startswith(str(file)), complaint in str(error.value)) == (True, True), str(error.value)


def test_half_a_last_line_is_no_step_yet(tmp_path: Path) -> None:
    file = tmp_path / "steps"
    file.write_text(json.dumps(HEADER) + "\n[1,2,3,4,0,0.5]\n[1,2,3,4,0,0")
    assert read_step_log(file, older(file)).steps == [(StepWork(1, 2, 3, 4), 0.5)]
