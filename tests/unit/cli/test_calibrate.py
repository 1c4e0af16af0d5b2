"""`fairlane calibrate` as a user types it, on a tiny model with random weights, and what the simulator makes of its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fairlane.cli import app
from fairlane.scheduler.simulator.fit import MAPE_LIMIT, WORST_LIMIT
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.step_time import H100
from fairlane.scheduler.step_work import StepWork, work_of
from fairlane.worker.step_log import StepLog
from tiny_shape import TINY

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("depth", ["0", "1"])
def test_an_engine_is_measured_and_the_simulator_takes_the_file(tmp_path: Path, depth: str) -> None:
    config, shape, cells = tmp_path / "tiny.json", tmp_path / "shape.json", tmp_path / "cells.json"
    config.write_text(json.dumps(TINY))
    settings = {
        "num_blocks": "400",
        "threads": "1",
        "max_num_seqs": "8",
        "max_num_batched_tokens": "128",
        "pipeline_depth": depth,
    }
    settings["host_kv_cache"] = "1MiB"
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    asked = ("--model-config", str(config), "--device", "cpu", "--budget", "2", "--out", str(shape), "--json", str(cells), *flags)
    done = run("calibrate", *asked)
    found, document = WorkerShape.load(shape), json.loads(cells.read_text())
    ids = [check["id"] for check in document["checks"]]
    is_good = document["checks"][0]["measured"] <= MAPE_LIMIT and document["checks"][1]["measured"] <= WORST_LIMIT
    # How good a fit of microseconds on a busy machine is nobody can promise.
    assert done.exit_code == (0 if is_good else 1), done.output
    assert (ids, found.num_blocks, found.max_num_seqs, found.depth) == (["CAL-MAPE", "CAL-WORST"], 399, 8, int(depth))
    policy = str(ROOT / "configs" / "tenants.yaml")
    simulated = run("policy", "simulate", policy, "--workload", "W1", "--duration", "1s", "--shape", str(shape))
    assert simulated.exit_code == 0, simulated.output


def step_log(path: Path, works: list[StepWork]) -> str:
    log = StepLog(path, WorkerShape(num_blocks=321).document({"model": "tiny"}))
    for work in works * 3:
        log.write(work, H100.seconds(work))
    log.close()
    return str(path)


def test_a_workers_recorded_steps_are_fitted(tmp_path: Path) -> None:
    works = [work_of(n, n * 500, chunks) for n in (1, 8, 64, 250) for chunks in ((), ((0, 100),), ((0, 900),), ((2000, 300),))]
    out = tmp_path / "shape.json"
    done = run("calibrate", "--recorded", step_log(tmp_path / "steps", works), "--out", str(out))
    shape, about = WorkerShape.load(out), json.loads(out.read_text())["about"]
    assert (done.exit_code, "48 steps of 16 kinds, tiny" in done.stdout, shape.num_blocks, about["cells"]) == (0, True, 321, 16)
    assert shape.step.token_s == pytest.approx(H100.token_s, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("--out", "/no/such/folder/x"), 2, "--out: there is no folder"),
        (("--json", "."), 2, "--json: . is a folder"),
        (("--recorded", "."), 1, ".: cannot be read"),
        (("--recorded", "/no/such/file"), 1, "/no/such/file: cannot be read"),
        (("--recorded", "x", "--model", "smollm2"), 2, "--recorded measures nothing"),
        (("--model-config", "llama-9"), 2, "one of llama-2-7b"),
        (("--set", "max_num_seqs=-1"), 2, "max-num-seqs"),
    ],
)
def test_misuse_is_one_line(tmp_path: Path, arguments: tuple[str, ...], code: int, complaint: str) -> None:
    out = () if "--out" in arguments else ("--out", str(tmp_path / "shape.json"))
    done = run("calibrate", *arguments, *out)
    assert (done.exit_code, complaint in done.stderr, len(done.stderr.splitlines())) == (code, True, 1), done.stderr


def test_steps_that_say_too_little_are_said_to(tmp_path: Path) -> None:
    done = run("calibrate", "--recorded", step_log(tmp_path / "steps", [work_of(1, 9)]), "--out", str(tmp_path / "shape.json"))
    assert (done.exit_code, "there is no fit: 1 kinds of steps: at least 12 are needed" in done.stderr) == (1, True)
