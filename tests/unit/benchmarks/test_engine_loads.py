"""The loads that the engine benchmark runs, the peers' figures that it compares with, and a dry run of all of it on this CPU."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_engine  # noqa: E402 - benchmarks/ is no package: its scripts run from their own folder
from engine_loads import cases, chosen  # noqa: E402
from engine_peers import Peers, checks  # noqa: E402

from fairlane.bench.figures import figures, median_run, percentile  # noqa: E402
from fairlane.bench.host_times import HostTimes, Turn  # noqa: E402
from fairlane.bench.loads import Load, chat_lengths, uniform  # noqa: E402
from fairlane.bench.run import Outcome, Track  # noqa: E402
from fairlane.worker.config import Device, LoadFormat, WorkerConfig  # noqa: E402
from fairlane.worker.models.config import load_model_config  # noqa: E402
from tiny_shape import TINY  # noqa: E402

SHAPES = {  # layers, heads, KV heads, hidden, intermediate, vocabulary, tied
    "llama-3.1-8b": (32, 32, 8, 4096, 14336, 128256, False),
    "llama-2-7b": (32, 32, 32, 4096, 11008, 32000, False),
    "qwen3-0.6b": (28, 16, 8, 1024, 3072, 151936, True),
    "qwen3-8b": (36, 32, 8, 4096, 12288, 151936, False),
}


# -- loads ---------------------------------------------------------------------------------------------------------------


def test_the_chat_list_is_the_one_the_peers_ran() -> None:
    chat = chat_lengths()
    sums = [(len(part), sum(p for p, _ in part), sum(o for _, o in part)) for part in (chat, chat[:128], chat[:32])]
    # The peers' rows of the same parts: total tokens/s over wall s says the same, 15,412 * 43.5 = 670,000 = 541,141 + 129,769.
    assert sums == [(512, 541_141, 129_769), (128, 121_880, 34_218), (32, 32_837, 7_310)]


def test_every_load_has_the_requests_and_tokens_of_its_name() -> None:
    found = {case.id: (case.load.num_requests, case.load.prompt_tokens, case.load.output_tokens) for case in all_cases()}
    chat = (512, 541_141, 129_769)
    assert found == {
        "H1": (1, 128, 256),
        **{f"H2-B{batch}": (batch, 512 * batch, 128 * batch) for batch in (8, 32, 64, 128, 256)},
        "H4-1x8000": (1, 8000, 1),
        "H4-8x2000": (8, 16_000, 8),
        **{f"IDLE-B{batch}": (batch, 512 * batch, 128 * batch) for batch in (32, 256)},
        "H3-512": chat,
        "H3-512-256seqs": chat,
        "POLICY-VIP": chat,
        "POLICY-FAIR": chat,
    }


def all_cases(model: str = "llama-3.1-8b") -> list[Any]:
    return cases(model, chat_lengths())


def test_each_model_runs_what_its_peers_ran_unless_told_otherwise() -> None:
    ran = {model: [case.id for case in chosen(model, all_cases(model), [])] for model in ("qwen3-0.6b", "llama-2-7b")}
    assert ran == {
        "qwen3-0.6b": ["H1", "H2-B1", "H2-B64", "H2-B256", "IDLE-B32", "IDLE-B256"],
        "llama-2-7b": ["H3-512", "H3-128", "H3-32"],
    }


def test_rows_are_chosen_by_group_or_by_name_and_not_by_a_name_cut_short() -> None:
    assert [case.id for case in chosen("llama-3.1-8b", all_cases(), ["H2-B8", "H4"])] == ["H2-B8", "H4-1x8000", "H4-8x2000"]


def test_a_group_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="H9-B8: no such row"):
        chosen("llama-3.1-8b", all_cases(), ["H1", "H9-B8"])


def test_prompts_are_the_same_for_a_seed_and_differ_between_seeds() -> None:
    load = Load(((5, 1), (300, 1)))
    first, again, other = load.prompts(1000, 7), load.prompts(1000, 7), load.prompts(1000, 8)
    lengths, ids = [len(prompt) for prompt in first], {token for prompt in first for token in prompt}
    assert (first == again, first != other, lengths, ids <= set(range(1000))) == (True, True, [5, 300], True)


def test_scaling_shrinks_counts_and_lengths_and_keeps_prefill_only_loads_so() -> None:
    shrunk = (uniform(256, 512, 128).scaled(0.02), uniform(8, 2000, 1).scaled(0.02), uniform(1, 128, 256).scaled(0.001))
    assert [load.lengths for load in shrunk] == [((10, 3),) * 5, ((40, 1),), ((1, 2),)]


# -- figures -------------------------------------------------------------------------------------------------------------


def test_figures_of_two_requests_computed_by_hand() -> None:
    # Submitted at 10. First tokens at 11 and 12; the first ends at 14 with its 4th token, the other at 15 with its 3rd.
    tracks = [Track(4, 11.0, 14.0, ended_s=14.0), Track(3, 12.0, 15.0, ended_s=15.0)]
    steps = [(11.0, 1), (12.0, 2), (13.0, 1), (14.0, 2), (15.0, 1)]
    row = figures(Outcome(Load(((30, 4), (20, 3))), 10.0, tracks, steps, 0, 0))
    expected = {
        "wall_s": 5.0,
        "out_tok_s": 7 / 5,
        "total_tok_s": 57 / 5,
        "req_s": 2 / 5,
        "ttft_mean_ms": 1500,
        "ttft_last_ms": 2000,
        "prefill_tok_s": 25,
        "tpot_mean_ms": 1250,  # (3 s / 3 + 3 s / 2) / 2
        "decoding_tok_s": 1.5,  # between 12 and 14: 1 + 2 tokens in 2 s
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected)


def test_there_is_no_rate_of_all_decoding_when_one_ends_before_another_begins() -> None:
    tracks = [Track(2, 1.0, 2.0, ended_s=2.0), Track(2, 3.0, 4.0, ended_s=4.0)]
    row = figures(Outcome(Load(((1, 2), (1, 2))), 0.0, tracks, [(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)], 0, 0))
    assert row["decoding_tok_s"] is None


def test_percentiles_lie_between_neighbours() -> None:
    assert [percentile([1.0, 2.0, 3.0, 5.0], part) for part in (0.0, 0.5, 0.9, 1.0)] == pytest.approx([1.0, 2.5, 4.4, 5.0])


def test_the_median_run_is_a_whole_run_and_of_two_the_lower() -> None:
    runs = [{"x": 3.0, "n": 1}, {"x": 1.0, "n": 2}, {"x": 2.0, "n": 3}]
    assert (median_run(runs, "x")["n"], median_run(runs[:2], "x")["n"]) == (3, 2)


class Event:
    """A CUDA event that happened at a time, in ms."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms

    def synchronize(self) -> None:
        pass


def test_host_work_is_all_but_the_wait_and_only_of_turns_in_the_window() -> None:
    # schedule, launch, update, take, wait: 1 + 2 + 1 + 1 + 4 of 10 ms, so 1 ms is the rest and 6 ms are the host's.
    parts = (0.001, 0.002, 0.001, 0.001, 0.004)
    turns = [Turn(0.0, 0.5, (0.1,) * 5, 1), Turn(1.0, 1.01, parts, 2), Turn(1.1, 1.11, parts, 3), Turn(1.2, 2.0, parts, 4)]
    events = [(Event(at), Event(at + 4.0)) for at in (0.0, 10.0, 14.2, 99.0)]  # steps 2 and 3 are 0.2 ms apart
    found = HostTimes(turns=turns, step_events=events, runner_s=[0.5, 0.006, 0.008, 0.5]).figures(1.0, 1.5)
    names = ("steps", "step_ms", "host_ms", "launch_ms", "rest_ms", "wait_ms", "runner_ms", "device_idle_us")
    assert [found[name] for name in names] == pytest.approx([2, 10, 6, 2, 1, 4, 7, 200])


# -- peers ---------------------------------------------------------------------------------------------------------------


def test_the_peers_file_says_what_it_is_of() -> None:
    document = Peers().document
    said = (document["date"], document["versions"]["vllm"], document["versions"]["transformers"], "H200" in document["source"])
    assert said == ("2026-11-29", "0.25.1", "5.17.0", True)


def test_the_peers_file_has_every_figure_that_something_is_required_against() -> None:
    peers = Peers()
    decoding = [peers.row("H2", "vllm", "llama-3.1-8b", batch=b)["decoding_tok_s"] for b in (8, 32, 64, 128, 256)]  # type: ignore[index]
    output = [peers.row("H2", "vllm", "llama-3.1-8b", batch=b)["out_tok_s"] for b in (8, 32, 64, 128, 256)]  # type: ignore[index]
    small = [peers.row("H2", "vllm", "qwen3-0.6b", batch=b)["out_tok_s"] for b in (1, 64, 256)]  # type: ignore[index]
    prefill = [row["ttft_last_ms"] for row in peers.document["H4"]]
    assert (decoding, output, small, prefill) == (
        [1599, 5624, 9699, 14662, 18340],
        [1376, 3721, 5128, 6235, 6776],
        [369, 11542, 20969],
        [211, 379],
    )


def test_every_rate_of_the_peers_agrees_with_its_wall_time() -> None:
    chat = chat_lengths()
    off = []
    for row in Peers().document["H3"]:
        if "stopped" in row["setting"]:
            continue  # its 19 requests are those that happened to end
        out = sum(output for _, output in chat[: row["requests"]])
        off.append(abs(row["out_tok_s"] * row["wall_s"] / out - 1))
    assert max(off) < 0.005


def test_all_checks_are_made_and_a_row_equal_to_the_peer_passes_only_what_asks_for_no_more() -> None:
    peers = Peers()
    made = {check.id: check.passed for check in checks(peer_rows(peers), peers)}
    assert made == {
        "H1-8B": False,  # 4.4 ms are asked, vLLM has 4.77
        "H1-0.6B": False,
        **{f"H2-8B-B{batch}-{what}": True for batch in (8, 32, 64, 128, 256) for what in ("DEC", "OUT")},
        "H2-8B-DEC": False,  # 1.07 on average
        **{f"H2-0.6B-B{batch}": False for batch in (1, 64, 256)},  # 1.2
        "H3-8B-512-VLLM": True,
        "H3-8B-512-HF": True,  # 20.1 is more than 1.5 x 13.1
        "H3-7B-512-VLLM": True,
        "H3-7B-128-HF": False,
        "H3-7B-32-HF-STATIC": False,
        "H4-8B-1x8000": True,
        "H4-8B-8x2000": True,
        "IDLE-B32-8B": True,
        "IDLE-B256-8B": False,
        "POLICY-VIP": True,
        "POLICY-FAIR": False,
    }


def peer_rows(peers: Peers) -> list[dict[str, Any]]:
    """Our rows, had we the peers' figures; 1.5 ms + a little of host work."""
    rows: list[dict[str, Any]] = []
    for group, prefix in (("H1", "H1"), ("H2", "H2-B"), ("H4", "H4-")):
        for peer in peers.document[group]:
            if peer["engine"] == "vllm":
                row = {"row": f"{prefix}{peer.get('batch', peer.get('case', ''))}", "tpot_mean_ms": peer.get("tpot_ms")}
                rows.append({**peer, **row})
    rows += [
        {"model": "llama-3.1-8b", "row": "H3-512", "req_s": 20.1},
        {"model": "llama-2-7b", "row": "H3-512", "req_s": 11.8},
        {"model": "llama-2-7b", "row": "H3-128", "req_s": 7.1},
        {"model": "llama-2-7b", "row": "H3-32", "req_s": 0.34},
        {"model": "llama-3.1-8b", "row": "IDLE-B32", "host_ms": 0.7},
        {"model": "llama-3.1-8b", "row": "IDLE-B256", "host_ms": 1.51},
        {"model": "llama-3.1-8b", "row": "POLICY-VIP", "ratio": 0.9901, "rounds": 3},
        {"model": "llama-3.1-8b", "row": "POLICY-FAIR", "ratio": 0.9899, "rounds": 3},
    ]
    return rows


# -- models and settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_the_models_have_the_shapes_they_are_named_after(name: str) -> None:
    c = load_model_config(ROOT / "configs" / "models" / f"{name}.json")
    shape = (c.num_layers, c.num_heads, c.num_kv_heads, c.hidden_size, c.intermediate_size, c.vocab_size, c.tie_word_embeddings)
    assert (shape, c.head_dim, c.qk_norm, c.dtype) == (SHAPES[name], 128, name.startswith("qwen3"), "bfloat16")


def test_the_settings_for_the_card_are_valid_and_fit_beside_the_weights() -> None:
    given = bench_engine.arguments(["--set", "max_num_seqs=256"])
    config = bench_engine.worker_config(given, "llama-3.1-8b")
    expected = dataclasses.replace(
        WorkerConfig(),
        model=str(ROOT / "configs" / "models" / "llama-3.1-8b.json"),
        load_format=LoadFormat.DUMMY,
        device=Device.CUDA,
        kv_cache=112 << 30,
        prefix_caching=False,
        max_num_seqs=256,
        max_num_resident=512,
        max_num_batched_tokens=8192,
        pipeline_depth=1,
    )
    weights_gib = 8.03e9 * 2 / 2**30
    assert (config, config.kv_cache / 2**30 + weights_gib < 130) == (expected, True)


# -- a dry run -----------------------------------------------------------------------------------------------------------


def dry_run(tmp_path: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, document and CSV of a run on the CPU with a tiny model."""
    model = tmp_path / "tiny.json"
    model.write_text(json.dumps(TINY))
    files = ["--json", str(tmp_path / "out.json"), "--csv", str(tmp_path / "out.csv")]
    common = ["--device", "cpu", "--model", str(model), "--set", "threads=1", "--set", "num_blocks=512", "--repeats", "1"]
    code = bench_engine.main([*common, *files, *more])
    csv = tmp_path / "out.csv"
    return code, json.loads((tmp_path / "out.json").read_text()), csv.read_text() if csv.exists() else ""


def test_every_group_runs_on_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = "H1,H2-B8,H2-B256,H3,H4,IDLE,POLICY"
    code, document, csv = dry_run(tmp_path, "--scale", "0.02", "--only", groups, "--policy-rounds", "1")
    rows = {row["row"]: row for row in document["rows"]}
    names = ["H1", "H2-B8", "H2-B256", "H4-1x8000", "H4-8x2000", "IDLE-B32", "IDLE-B256", "H3-512", "H3-512-256seqs"]
    names += ["POLICY-VIP", "POLICY-FAIR"]
    counts = (rows["H2-B256"]["requests"], rows["H2-B256"]["output_tokens"], rows["H3-512"]["requests"])
    said = [name for name in names if f"= tiny {name}:" in capsys.readouterr().out or f"tiny,{name}," in csv]
    finite = all(math.isfinite(value) for row in rows.values() for value in row.values() if isinstance(value, float))
    assert (code, list(rows), counts, said, finite, document["checks"]) == (0, names, (5, 15, 10), names, True, [])


def test_a_row_that_cannot_run_is_reported_and_the_others_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The context of 256 tokens is too short for the 8000 and 2000 of H4, at whose turn it is after H1.
    code, document, _ = dry_run(tmp_path, "--scale", "0.2", "--only", "H1,H4,IDLE-B32")
    printed = capsys.readouterr().out
    assert (code, [row["row"] for row in document["rows"]], "tiny H4-1x8000: request 0 gave 0 of 1 tokens" in printed) == (
        0, ["H1", "IDLE-B32"], True,
    )  # fmt: skip


def test_when_the_time_is_over_nothing_more_begins_and_the_exit_code_says_that_nothing_was_measured(tmp_path: Path) -> None:
    code, document, _ = dry_run(tmp_path, "--scale", "0.02", "--only", "H1", "--budget-s", "0.000001")
    assert (code, document["rows"]) == (1, [])
