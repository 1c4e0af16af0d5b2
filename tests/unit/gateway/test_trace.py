"""The recording of requests: what a line holds, that its files stay below their size, that a disk that refuses costs lines and
nothing else, and what an export makes of it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fairlane.clock import FakeClock
from fairlane.errors import FairlaneError
from fairlane.gateway.trace.export import export
from fairlane.gateway.trace.files import FOLDER, TraceFiles, recorded_files, recorded_lines
from fairlane.gateway.trace.prefix import BLOCK_TOKENS, MAX_BLOCKS, prefix_ids
from fairlane.gateway.trace.record import Record, Tape
from fairlane.gateway.trace.recorder import REST_S, TraceRecorder, line
from fairlane.protos.fairlane.v1 import worker_pb2 as pb
from fairlane.scheduler.simulator.traces import load_trace

KEY = b"k" * 32


class Inbox:
    def __init__(self, violation: str | None = None) -> None:
        self.violation = violation

    def offer(self, delta: pb.Delta) -> str | None:
        return self.violation

    def fail(self, error: FairlaneError) -> None:
        raise AssertionError("nothing fails here")


def record(at: float = 1000.0, node: str = "acme/shop", **changes: Any) -> Record:
    values: dict[str, Any] = {
        "prompt": [7] * 10,
        "domain": "d",
        "max_tokens": 64,
        "output_tokens": 5,
        "end": "stop",
        "end_s": 2.0,
    }
    return Record(at, node, "gold", "tiny", **(values | changes))


def taped(deltas: list[pb.Delta], *, violation: str | None = None, end: str = "stop") -> list[Record]:
    """Arrived at 10 s by the clock, 1010 by the wall; the worker has it after 1 s, each delta takes another."""
    clock, records = FakeClock(10.0), list[Record]()
    tape = Tape(clock.now(), clock, lambda: 1000.0 + clock.now(), records.append)
    tape.bounded(30.0, 60.0)
    clock.advance(1.0)
    tape.watch(Inbox(violation), pb.Add(tenant="acme/shop", tier="gold", prompt_token_ids=[1, 2, 3], max_tokens=9), "tiny")
    for delta in deltas:
        clock.advance(1.0)
        tape.offer(delta)
    tape.end(end)
    tape.end("INTERNAL")
    return records


def read(state_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for _, _, text in recorded_lines(state_dir / FOLDER)]


def exported(records: list[Record], **options: Any) -> list[dict[str, Any]]:
    lines = [(Path("x"), number, line(one, KEY)) for number, one in enumerate(records, 1)]
    return [json.loads(text) for text in export(lines, skipped=lambda path, number: None, **options)]


# -- one request -----------------------------------------------------------------------------------------------------------


def test_a_record_says_when_how_many_and_how_it_ended() -> None:
    deltas = [
        pb.Delta(queue_position=0),
        pb.Delta(started=pb.StartedDelta(cached_tokens=2, queue_s=0.5)),
        pb.Delta(token_ids=[5, 6]),
        pb.Delta(token_ids=[7], ended=pb.EndedDelta(reason="stop", preemptions=3)),
    ]
    (found,) = taped(deltas)
    assert (found.at, found.node, found.tier, found.model, list(found.prompt)) == (1010.0, "acme/shop", "gold", "tiny", [1, 2, 3])
    assert (found.max_tokens, found.max_wait_s, found.deadline_s) == (9, 30.0, 60.0)
    assert (found.cached_tokens, found.output_tokens, found.preemptions) == (2, 3, 3)
    assert (found.queue_s, found.ttft_s, found.end_s, found.end) == (0.5, 4.0, 5.0, "stop")


def test_the_first_end_of_a_request_is_the_one_recorded() -> None:
    assert [found.end for found in taped([], end="CLIENT_GONE")] == ["CLIENT_GONE"]


def test_a_request_that_the_worker_never_got_is_not_recorded() -> None:
    records: list[Record] = []
    Tape(0.0, FakeClock(0.0), lambda: 0.0, records.append).end("QUEUE_FULL")
    assert records == []


def test_deltas_that_break_the_protocol_do_not_count() -> None:
    (found,) = taped([pb.Delta(token_ids=[1, 2])], violation="tokens before the start")
    assert (found.output_tokens, found.ttft_s) == (0, None)


def test_a_line_has_no_token_and_leaves_out_what_is_not_known() -> None:
    found = json.loads(line(record(prompt=[987654] * 10), KEY))
    assert ("987654" in json.dumps(found), found["prompt_tokens"]) == (False, 10)
    assert set(found) == {
        "at", "node", "tier", "model", "prompt_tokens", "output_tokens", "cached_tokens", "max_tokens",
        "end_s", "end", "preemptions",
    }  # fmt: skip


# -- prefixes --------------------------------------------------------------------------------------------------------------


def test_equal_beginnings_have_equal_ids_up_to_where_they_part() -> None:
    start = list(range(2 * BLOCK_TOKENS))
    one = prefix_ids([*start, *[1] * BLOCK_TOKENS, 5], "d", KEY)
    other = prefix_ids([*start, *[2] * BLOCK_TOKENS], "d", KEY)
    assert (len(one), len(other), one[:2] == other[:2], one[2] == other[2]) == (3, 3, True, False)


@pytest.mark.parametrize(("domain", "key"), [("e", KEY), ("d", b"j" * 32)])
def test_other_domains_and_other_keys_have_other_ids(domain: str, key: bytes) -> None:
    prompt = [1] * BLOCK_TOKENS
    assert prefix_ids(prompt, domain, key) != prefix_ids(prompt, "d", KEY)


def test_a_prompt_of_less_than_a_block_or_without_a_shared_cache_has_no_ids_and_a_long_one_not_too_many() -> None:
    long = [1] * (BLOCK_TOKENS * (MAX_BLOCKS + 2))
    lengths = [len(prefix_ids(*call, KEY)) for call in (([1] * (BLOCK_TOKENS - 1), "d"), (long, ""), (long, "d"))]
    assert lengths == [0, 0, MAX_BLOCKS]


# -- files -----------------------------------------------------------------------------------------------------------------


def test_files_stay_below_their_size_together_and_keep_the_newest(tmp_path: Path) -> None:
    files, limit = TraceFiles(tmp_path / "state", 8000), 8000
    sizes = []
    for number in range(500):
        files.append(json.dumps({"number": number, "filler": "x" * 80}))
        sizes.append(sum(path.stat().st_size for path in recorded_files(tmp_path / "state" / FOLDER)))
    files.close()
    numbers = [found["number"] for found in read(tmp_path / "state")]
    assert (max(sizes) <= limit, numbers == list(range(numbers[0], 500)), len(numbers) > 50) == (True, True, True)


def test_only_its_user_can_read_a_recording(tmp_path: Path) -> None:
    files = TraceFiles(tmp_path / "state", 1 << 20)
    files.append("{}")
    files.close()
    modes = [
        stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "state" / FOLDER, *recorded_files(tmp_path / "state" / FOLDER))
    ]
    assert modes == [0o700, 0o600]


def test_a_folder_that_others_can_open_is_refused(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER).chmod(0o755)
    with pytest.raises(PermissionError, match="open to other users"):
        TraceFiles(tmp_path, 1 << 20)


def test_a_new_process_goes_on_in_a_file_of_its_own(tmp_path: Path) -> None:
    for number in range(2):
        files = TraceFiles(tmp_path / "state", 1 << 20)
        files.append(json.dumps({"number": number}))
        files.close()
    assert [path.name for path in recorded_files(tmp_path / "state" / FOLDER)] == ["00000001.jsonl", "00000002.jsonl"]


def test_restarts_alone_push_nothing_out(tmp_path: Path) -> None:
    for number in range(30):
        files = TraceFiles(tmp_path / "state", 1 << 20)
        files.append(json.dumps({"number": number}))
        files.close()
    assert [found["number"] for found in read(tmp_path / "state")] == list(range(30))


# -- a disk that refuses ---------------------------------------------------------------------------------------------------


class Disk:
    """Opens files, or /dev/full instead: a disk without space, as the kernel reports it."""

    def __init__(self) -> None:
        self.is_full = False

    def open(self, path: Path, flags: int, mode: int) -> int:
        return os.open("/dev/full", os.O_WRONLY) if self.is_full else os.open(path, flags, mode)


def recorded_by(recorder: TraceRecorder, ends: list[str]) -> None:
    for end in ends:
        with recorder.follow() as tape:
            tape.watch(Inbox(), pb.Add(tenant="acme/shop", tier="gold", prompt_token_ids=[1], max_tokens=1), "tiny")
            tape.end(end)


def test_a_full_disk_costs_lines_which_are_counted_and_no_request(tmp_path: Path) -> None:
    disk, dropped, clock = Disk(), list[int](), FakeClock(0.0)
    disk.is_full = True
    recorder = TraceRecorder(TraceFiles(tmp_path / "state", 1 << 20, disk.open), clock, dropped.append)
    recorded_by(recorder, ["stop"] * 3)
    recorder.close()
    assert (sum(dropped), read(tmp_path / "state")) == (3, [])


def test_recording_goes_on_once_the_disk_has_room_again(tmp_path: Path) -> None:
    disk, refused, clock = Disk(), threading.Event(), FakeClock(0.0)
    disk.is_full = True
    recorder = TraceRecorder(TraceFiles(tmp_path / "state", 1 << 20, disk.open), clock, lambda number: refused.set())
    recorded_by(recorder, ["length"])
    assert refused.wait(10)
    disk.is_full = False
    clock.advance(REST_S)
    recorded_by(recorder, ["stop"])
    recorder.close()
    assert [found["end"] for found in read(tmp_path / "state")] == ["stop"]


CUT = """
import resource, sys
from pathlib import Path
from fairlane.gateway.trace.files import TraceFiles
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
files = TraceFiles(Path(sys.argv[1]), 1 << 20)
files.append('{"number": 1, "filler": "%s"}' % ("x" * 40))
try:
    files.append('{"number": 2, "filler": "%s"}' % ("x" * 40))
except OSError:
    files.append('{"number": 3}')
"""


def test_half_a_line_that_a_disk_took_is_taken_back(tmp_path: Path) -> None:
    """The kernel's own limit on a file's size: it takes the first 100 bytes and refuses the rest."""
    run = subprocess.run([sys.executable, "-c", CUT, str(tmp_path / "state")], capture_output=True, text=True, check=False)
    assert (run.stderr, [found["number"] for found in read(tmp_path / "state")]) == ("", [1, 3])


# -- export ----------------------------------------------------------------------------------------------------------------


def test_an_export_is_in_order_of_arrival_from_the_first_one_on() -> None:
    found = exported([record(1002.5), record(1000.0), record(1001.0)])
    assert [one["arrival_s"] for one in found] == [0.0, 1.0, 2.5]


def test_an_export_since_a_time_begins_there() -> None:
    found = exported([record(1000.0), record(1001.0), record(1002.0)], since_s=1001.0)
    assert [one["arrival_s"] for one in found] == [0.0, 1.0]


@pytest.mark.parametrize(("end", "cancel"), [("CLIENT_GONE", 2.0), ("CANCELLED", 2.0), ("stop", None), ("QUEUE_TIMEOUT", None)])
def test_a_cancelled_request_says_when_its_client_gave_up(end: str, cancel: float | None) -> None:
    (found,) = exported([record(end=end)])
    assert (found.get("cancel_after_s"), found["end"]) == (cancel, end)


def test_a_request_without_output_counts_as_one_token() -> None:
    (found,) = exported([record(output_tokens=0, end="DEADLINE_EXCEEDED")])
    assert found["output_tokens"] == 1


def test_prefixes_come_with_the_size_of_their_blocks() -> None:
    (found,) = exported([record(prompt=[3] * BLOCK_TOKENS)])
    assert (found["prefix_block"], found["prefix"]) == (BLOCK_TOKENS, prefix_ids([3] * BLOCK_TOKENS, "d", KEY))


def test_anonymous_names_tell_nodes_apart_keep_their_tree_and_say_nothing() -> None:
    records = [record(node=node) for node in ("acme/shop", "acme/docs", "acme/shop", "saas/paid/alice@example.org")]
    found = exported(records, anonymise=True)
    shop, docs, again, alice = (one["node"] for one in found)
    assert (shop == again, shop != docs, shop.split("/")[0] == docs.split("/")[0], alice.count("/")) == (True, True, True, 2)
    assert [word for word in ("acme", "shop", "docs", "saas", "alice", "tiny") if word in json.dumps(found)] == []


@pytest.mark.parametrize("node", ["acme", "acme/shop", "acme/shop/alice"])
@pytest.mark.parametrize("end", ["stop", "CLIENT_GONE", "QUEUE_TIMEOUT"])
@pytest.mark.parametrize("anonymise", [False, True])
def test_whatever_is_recorded_the_simulator_reads(tmp_path: Path, node: str, end: str, anonymise: bool) -> None:
    ended = record(1000.0, node, end=end, output_tokens=0, max_wait_s=0.0, deadline_s=0.0, prompt=[7] * BLOCK_TOKENS)
    file = tmp_path / "load.jsonl"
    file.write_text("".join(f"{json.dumps(one)}\n" for one in exported([ended], anonymise=anonymise)))
    (request,) = load_trace(file).requests
    assert (request.node.count("/"), request.tier, request.prompt_tokens) == (node.count("/"), "gold", BLOCK_TOKENS)


def test_two_exports_give_other_anonymous_names() -> None:
    one, other = (exported([record()], anonymise=True)[0]["node"] for _ in range(2))
    assert one != other


@pytest.mark.parametrize("damaged", ["", "{", "[]", "null", '{"at":1}', '{"at":"x","node":"a/b","tier":"t"}', "\ufffd"])
def test_a_line_that_is_no_record_is_skipped_and_named(damaged: str) -> None:
    skipped: list[int] = []
    lines = [(Path("x"), 1, line(record(), KEY)), (Path("x"), 2, damaged)]
    found = list(export(lines, skipped=lambda path, number: skipped.append(number)))
    assert (len(found), skipped) == (1, [2])
