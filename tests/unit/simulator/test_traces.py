"""Trace files: each kind's sample, and one clear line for each kind of nonsense."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from fairlane.scheduler.simulator.errors import SimulationInputError
from fairlane.scheduler.simulator.plan import plan
from fairlane.scheduler.simulator.traces import SAMPLES, load_trace

RECORDED = {"arrival_s": 0.5, "node": "o/t", "tier": "gold", "prompt_tokens": 9, "output_tokens": 3}


@pytest.mark.parametrize(
    ("name", "requests", "nodes", "prefixes"),
    [
        ("azure_conv.csv.gz", 2000, 8, False),
        ("azure_code.csv.gz", 1000, 8, False),
        ("arena.csv.gz", 1500, 27, False),
        ("mooncake.jsonl.gz", 400, 8, True),
    ],
)
def test_a_sample_loads_whole(name: str, requests: int, nodes: int, prefixes: bool) -> None:
    workload = load_trace(SAMPLES / name)
    arrivals = [request.arrival_s for request in workload.requests]
    assert (len(arrivals), len(workload.nodes), workload.has_prefixes, arrivals == sorted(arrivals)) == (
        requests, nodes, prefixes, True,
    )  # fmt: skip


def test_servegen_draws_the_recorded_rate() -> None:
    # Its clients together send 1,113 requests a second in the sample's first ten minutes.
    rows = gzip.decompress((SAMPLES / "servegen_rates.csv.gz").read_bytes()).decode().splitlines()[1:]
    start_s = min(float(row.split(",")[1]) for row in rows)
    rate = sum(float(row.split(",")[2]) for row in rows if float(row.split(",")[1]) == start_s)
    workload = load_trace(SAMPLES / "servegen_rates.csv.gz", duration_s=600.0, speed=0.01)
    assert len(workload.requests) / 600 == pytest.approx(rate * 0.01, rel=0.02)


def test_what_fairlane_records_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    more = {
        "arrival_s": 0.1,
        "model": "m",
        "ttft_s": 0.2,
        "end": "stop",
        "max_tokens": 64,
        "prefix": [3, 4],
        "prefix_block": 16,
        "cancel_after_s": 2.0,
    }
    file.write_text("\n".join(json.dumps(row) for row in (RECORDED, RECORDED | more)))
    first = load_trace(file).requests[0]
    assert (first.arrival_s, first.max_tokens, first.prefix, first.cancel_after_s, load_trace(file).prefix_block) == (
        0.1, 64, (3, 4), 2.0, 16,
    )  # fmt: skip


def test_speed_and_duration_cut_a_trace() -> None:
    whole, fast = load_trace(SAMPLES / "arena.csv.gz"), load_trace(SAMPLES / "arena.csv.gz", duration_s=60.0, speed=2.0)
    expected = [request.arrival_s / 2 for request in whole.requests if request.arrival_s < 120]
    assert [request.arrival_s for request in fast.requests] == expected


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1", 2, "TIMESTAMP: 'yesterday'"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:01,1,1\n2023-11-16 18:00:00,1,1",
            3,
            "is before the trace's first",
        ),
        ("arrival_s,tenant,prompt_tokens,output_tokens\n-1,c,1,1", 2, "arrival_s: '-1': at least 0 is needed"),
        ("arrival_s,tenant,prompt_tokens,output_tokens\nnan,c,1,1", 2, "arrival_s: 'nan'"),
        ("arrival_s,tenant,prompt_tokens,output_tokens\n1,c,0,1", 2, "prompt_tokens: '0': at least 1"),
        ("arrival_s,tenant,prompt_tokens,output_tokens\n1,c,1.5,1", 2, "prompt_tokens: '1.5': a whole number"),
        ("arrival_s,tenant,prompt_tokens,output_tokens\n1,c,1", 2, "3 fields: the header names 4"),
        ('{"timestamp": -5, "input_length": 1, "output_length": 1}', 1, "timestamp: -5"),
        ('{"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}', 1, "hash_ids"),
        (json.dumps(RECORDED | {"arrival_s": -0.5}), 1, "arrival_s: -0.5: at least 0 is needed"),
        (json.dumps(RECORDED | {"node": "a/b/c/d"}), 1, "node: 'a/b/c/d': organisation, organisation/tenant or"),
        (json.dumps(RECORDED | {"node": "o//m"}), 1, "node: 'o//m': organisation, organisation/tenant or"),
        (json.dumps(RECORDED) + "\nnonsense", 2, "is not a JSON object"),
        (json.dumps(RECORDED) + "\n" + '{"node":' + "[" * 100_000, 2, "is not a JSON object"),
        (json.dumps(RECORDED | {"prompt_tokens": 10**18}), 1, "prompt_tokens: 1000000000000000000: at most 10000000 is allowed"),
        (json.dumps(RECORDED | {"arrival_s": 10**400}), 1, "at least 0 is needed"),
        (json.dumps(RECORDED | {"arrival_s": True}), 1, "arrival_s: True: a number is needed"),
        (json.dumps(RECORDED | {"output_tokens": 10**15}), 1, "output_tokens: 1000000000000000: at most"),
        ("arrival_s,tenant,prompt_tokens,output_tokens\n1,c,1,1\n1," + "c" * 200_000 + ",1,1", 3, "is no line of a CSV file"),
        ('arrival_s,tenant,prompt_tokens,output_tokens\n1,"c,1,1\n1,c,1,1', 2, "is no line of a CSV file"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:01,1,1\n2023-11-16 18:00:02+00:00,1,1",
            3,
            "times with and without an offset",
        ),
        ("what,is,this", 1, "is no trace of a known kind"),
    ],
)
def test_nonsense_is_one_line_with_its_place(tmp_path: Path, text: str, line: int, complaint: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(SimulationInputError) as error:
        load_trace(file)
    message = str(error.value)
    assert (message.startswith(f"{file}:{line}: "), complaint in message, "\n" in message) == (True, True, False), message


@pytest.mark.parametrize(
    ("raw", "complaint"), [(b"", "is empty"), (b"\x1f\x8b\x08broken", "damaged gzip"), (b"\xff\xfe\x00", "not UTF-8")]
)
def test_a_file_that_is_no_text_is_said_to_be(tmp_path: Path, raw: bytes, complaint: str) -> None:
    file = tmp_path / "trace"
    file.write_bytes(raw)
    with pytest.raises(SimulationInputError, match=complaint):
        load_trace(file)


def test_a_rates_file_needs_its_lengths_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "x_rates.csv"
    file.write_text("client,t_s,rate_rps,cv,dist,shape,scale\n0,0,1,1,Gamma,1,1")
    with pytest.raises(SimulationInputError, match=r"x_lengths\.csv: cannot be read"):
        load_trace(file)


@pytest.mark.parametrize(
    ("rate", "dist", "shape", "complaint"),
    [
        ("1", "Weibull", "1e-5", r"x_rates\.csv:2: shape: '1e-5': at least 0\.006 is needed"),
        ("1e12", "Gamma", "1", r"client 7 asks for 600,000,000,000,\d{3} requests in the 600 s from 0 s on: at most 10,000,000"),
    ],
)
def test_a_client_that_nobody_could_draw_is_said_to_be(tmp_path: Path, rate: str, dist: str, shape: str, complaint: str) -> None:
    (tmp_path / "x_lengths.csv").write_text("client,field,q0,q1\n7,input_tokens,1,2\n7,output_tokens,1,2")
    (tmp_path / "x_rates.csv").write_text(f"client,t_s,rate_rps,cv,dist,shape,scale\n7,0,{rate},1,{dist},{shape},1")
    with pytest.raises(SimulationInputError, match=complaint):
        load_trace(tmp_path / "x_rates.csv")


def test_a_trace_of_years_is_refused_unless_only_its_beginning_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(json.dumps(RECORDED | {"arrival_s": at_s}) for at_s in (0, 1e300)))
    beginning = load_trace(file, duration_s=60.0)
    with pytest.raises(SimulationInputError, match="days: at most 7 can be simulated; --duration takes its beginning"):
        load_trace(file)
    assert len(beginning.requests) == 1


def test_a_prefix_takes_no_more_memory_than_its_prompt(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps(RECORDED | {"prefix": [1, 2, 3], "prefix_block": 10**12}))
    request = plan(load_trace(file), is_cached=True)[0].request()
    assert request.prompt_token_ids == (0,) * 9
