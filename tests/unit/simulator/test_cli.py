"""`fairlane policy simulate` as a user types it: exit codes, files, and one line for each mistake."""

from __future__ import annotations

import io
import json
import re
import sys
from collections import Counter
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fairlane.cli import app
from fairlane.scheduler.policies import FCFSPolicy, plugins
from fairlane.scheduler.request import Sequence

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
            f"assertions[0].tier: platinum is no tier of {POLICY} that sends in this run: one of batch, gold",
        ),
        (
            "{node: no/body, metric: share, min: 1}",
            f"assertions[0].node: no/body is no node of {POLICY} that sends in this run: one",
        ),
        ("{tier: standard, metric: share, min: 1}", "assertions[0].tier: standard sends nothing in this run: one of"),
        ("{tier: gold, metric: share, max: 0.1, min: 0.9}", "assertions[0].min: 0.9 is above the max, 0.1 at 1:42"),
        ("{tier: gold, metric: kv_used_max, max: 1}", "kv_used_max is of everything or a node"),
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
        (("--workload", "W1", "--speed", "0"), "--speed: 0: more than 0 and at most 1000 is needed"),
        (("--workload", "W1", "--speed", "2e6"), "--speed: 2e+06: more than 0 and at most 1000 is needed"),
        (("--workload", "W1", "--shape", "/no/such/file"), "/no/such/file: there is no such file"),
        (("--workload", "W1", "--json", "/no/such/folder/x"), "--json: there is no folder"),
        (("--workload", "W1", "--json", "/"), "--json: / is a folder"),
        (("--workload", "W1", "--png", "/"), "--png: / is a folder"),
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


MEMBERS = """
version: 1
scheduler: {{tiers: fair}}
tiers: {{all: {{priority: 1}}}}
organisations:
  o: {{tenants: {{t: {{tiers: [all], members: {{}}, {more}}}, u: {{tiers: [all]}}}}}}
"""
SENT = {"arrival_s": 0, "tier": "all", "prompt_tokens": 90, "output_tokens": 500}


def of_members(folder: Path, more: str = "") -> tuple[str, ...]:
    """A policy, and a trace of two members of o/t, of o/t itself and of o/u, all alike."""
    lines = [json.dumps(SENT | {"node": node}) for node in ("o/t/ann", "o/t/bob", "o/t", "o/u")]
    policy = written(folder, "members.yaml", MEMBERS.format(more=more).replace("{}, }", "{}}"))
    return policy, "--trace", written(folder, "trace.jsonl", "\n".join(lines))


def test_a_promise_to_a_node_is_about_all_below_it(tmp_path: Path) -> None:
    shares = {"o": 1, "o/t": 0.75, "o/t/ann": 0.25, "o/u": 0.25}
    parts = [f"{{node: {node}, metric: share, min: {share}, max: {share}}}" for node, share in shares.items()]
    parts.append("{node: o/t, metric: kv_used_max, min: 0.000001, max: 1}")
    file = written(tmp_path, "a.yaml", f"assertions: [{', '.join(parts)}]\n")
    done = run(*of_members(tmp_path), "--assert", file)
    assert (done.exit_code, done.stdout.count("holds")) == (0, 5), done.output


def test_a_policy_that_the_worker_would_refuse_is_one_line(tmp_path: Path) -> None:
    done = run(*of_members(tmp_path, "kv_guarantee: 100M"))
    lines = done.stderr.splitlines()
    said = "members.yaml: a worker of this shape refuses it: kv_guarantee: 6250000" in lines[0]
    assert (done.exit_code, len(lines), said) == (1, 1, True), done.output


def test_a_plugin_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    policy = written(tmp_path, "p.yaml", MEMBERS.format(more="weight: 1").replace("tiers: fair", "plugin: nobodys"))
    done = run(policy, *FAST)
    assert (done.exit_code, "refuses it: no policy 'nobodys' is installed" in done.stderr) == (1, True), done.output


class Slack(FCFSPolicy):
    """Wrong from its first step on."""

    def peek(self) -> Sequence | None:
        raise LookupError("nobody knows")


def test_a_plugin_that_fcfs_took_the_place_of_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("slack", f"{__name__}:Slack", "fairlane.policies")
    monkeypatch.setattr(plugins, "entry_points", lambda **asked: [point])
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Slack.__module__])
    policy = written(tmp_path, "p.yaml", MEMBERS.format(more="weight: 1").replace("tiers: fair", "plugin: slack"))
    done = run(policy, *FAST)
    assert (done.exit_code, "its plugin was replaced by fcfs: peek raised LookupError" in done.stderr) == (1, True), done.output


def test_names_are_never_markup(tmp_path: Path) -> None:
    policy, *trace = of_members(tmp_path)
    (tmp_path / "[").mkdir()
    odd = str(Path(policy).rename(tmp_path / "[" / "red].yaml"))
    done = run(odd, *trace, "--against", odd)
    assert (done.exit_code, done.stdout.count(odd) >= 2) == (0, True), done.output


@pytest.mark.parametrize("width", [80, 100, 120, 180])
def test_a_narrow_terminal_cuts_no_figure(tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for columns in (width, 1000):
        console = Console(width=columns, record=True, file=io.StringIO())
        monkeypatch.setattr("fairlane.simulate.show.output_console", lambda console=console: console)
        run(*of_members(tmp_path), "--against", of_members(tmp_path)[0])
        shown[columns] = re.findall(r"[\d.,]*\d%?|TTFT|TPOT|recomputed", console.export_text())
    few, many = Counter(shown[width]), Counter(shown[1000])
    assert many - few == Counter(), shown[width]
