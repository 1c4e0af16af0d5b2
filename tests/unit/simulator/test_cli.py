"""`fairlane policy simulate` as a user types it: exit codes, files, and one line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fairlane.cli import app

ROOT = Path(__file__).parents[3]
POLICY = str(ROOT / "configs" / "tenants.yaml")
FAST = ("--workload", "W9", "--duration", "2s")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["policy", "simulate", *arguments])


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_it_tells_of_tiers_and_nodes_and_writes_what_it_says(tmp_path: Path) -> None:
    document = tmp_path / "out.json"
    done = run(POLICY, *FAST, "--json", str(document))
    found = json.loads(document.read_text())["runs"][0]
    assert (done.exit_code, set(found["tiers"]), "gold" in done.stdout, found["overall"]["tokens_per_s"] > 0) == (
        0, {"gold", "batch"}, True, True,
    ), done.output  # fmt: skip


def test_two_policies_stand_side_by_side_and_the_same_one_changes_nothing(tmp_path: Path) -> None:
    document = tmp_path / "out.json"
    done = run(POLICY, *FAST, "--against", POLICY, "--json", str(document))
    first, second = json.loads(document.read_text())["runs"]
    assert (done.exit_code, first, "change" in done.stdout) == (0, second, True)


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    def digest(seed: str) -> str:
        document = tmp_path / "out.json"
        run(POLICY, *FAST, "--seed", seed, "--json", str(document))
        return str(json.loads(document.read_text())["runs"][0]["event_log_sha256"])

    assert (digest("3") == digest("3"), digest("3") == digest("4")) == (True, False)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    run(POLICY, *FAST, "--against", POLICY, "--png", str(picture))
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("bound", "code"), [("max: 100000", 0), ("max: 0.001", 1), ("min: 100000", 1)])
def test_assertions_gate(tmp_path: Path, bound: str, code: int) -> None:
    file = written(tmp_path, "a.yaml", f"assertions: [{{tier: gold, metric: ttft_p99_ms, {bound}}}]\n")
    assert run(POLICY, *FAST, "--assert", file).exit_code == code


@pytest.mark.parametrize(
    ("assertion", "complaint"),
    [
        (
            "{tier: platinum, metric: ttft_p99_ms, max: 1}",
            "assertions[0].tier: platinum sends nothing in this run: one of batch, gold",
        ),
        ("{node: no/body, metric: share, min: 1}", "assertions[0].node: no/body sends nothing in this run"),
        ("{tier: gold, metric: ttft, max: 1}", "metric"),
        ("{tier: gold, metric: jain, min: 1}", "jain is of everything"),
        ("{tier: gold, node: chatly/free, metric: share, min: 1}", "a tier or a node, not both"),
        ("{tier: gold, metric: share}", "max or min is needed"),
        ("{tier: gold, metric: share, least: 1}", "least"),
    ],
)
def test_a_bad_assertion_is_one_line_and_misuse(tmp_path: Path, assertion: str, complaint: str) -> None:
    file = written(tmp_path, "a.yaml", f"assertions: [{assertion}]\n")
    done = run(POLICY, *FAST, "--assert", file)
    lines = done.stderr.splitlines()
    assert (done.exit_code, lines[0].startswith(f"{file}:1:"), complaint in lines[0], len(lines)) == (2, True, True, 1), (
        done.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "--trace FILE or --workload NAME"),
        (("--workload", "W1", "--trace", "x"), "--trace FILE or --workload NAME"),
        (("--workload", "W99"), "one of W1, W2"),
        (("--trace", "/no/such/file"), "/no/such/file: cannot be read"),
        (("--workload", "W1", "--duration", "soon"), '--duration: "soon"'),
        (("--workload", "W1", "--speed", "0"), "--speed: 0"),
        (("--workload", "W1", "--shape", "/no/such/file"), "/no/such/file: there is no such file"),
        (("--workload", "W1", "--json", "/no/such/folder/x"), "--json: there is no folder"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(arguments: tuple[str, ...], complaint: str) -> None:
    done = run(POLICY, *arguments)
    assert (done.exit_code, complaint in done.stderr, len(done.stderr.splitlines())) == (2, True, 1), done.stderr


def test_a_wrong_policy_is_said_as_policy_check_says_it(tmp_path: Path) -> None:
    file = written(tmp_path, "p.yaml", "version: 1\norganisations: {}\ntiers: {gold: {priority: high}}\n")
    done = run(file, *FAST)
    assert (done.exit_code, done.stderr.startswith(f"{file}:3:")) == (1, True), done.stderr


def test_a_shipped_sample_replays_under_every_shipped_policy() -> None:
    sample = str(ROOT / "scheduler" / "simulator" / "samples" / "arena.csv.gz")
    policies = [POLICY, *map(str, sorted((ROOT / "configs" / "policies").glob("*.yaml")))]
    codes = [run(policy, "--trace", sample, "--duration", "20s").exit_code for policy in policies]
    assert codes == [0] * len(policies)
