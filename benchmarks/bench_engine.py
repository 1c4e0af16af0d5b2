"""The whole engine, scheduler to sampled tokens, against what vLLM and transformers do with the same loads on the same card.
In process, random weights, greedy, token ids in and out, prefix caching off; all requests of a load are submitted at once.

    H1 one request   H2 batches   H3 a chat list   H4 prefill   IDLE host work of a step and idle device   POLICY their price

    python benchmarks/bench_engine.py                                       H1 to H4 and IDLE of llama-3.1-8b
    python benchmarks/bench_engine.py --model qwen3-0.6b,llama-2-7b         what is compared of other models
    python benchmarks/bench_engine.py --only H2-B32,H3 --budget-s 240       some rows; none begins, or goes on, after 240 s
    python benchmarks/bench_engine.py --only POLICY                         VIP and FAIR against FCFS: 24 runs, ten minutes
    python benchmarks/bench_engine.py --only POLICY --policy-rounds 1       8 runs; fcfs_apart says how much to believe of it
    python benchmarks/bench_engine.py --device cpu --model tiny.json --scale 0.02      a dry run on any machine

A line is printed as soon as a run is over. The settings of the worker are in worker_h200.yaml, the peers' figures in
peers_h200.json; a row that fails is reported and the next one begins.
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from engine_loads import POLICY_TENANTS, Case, cases, chosen, warm_up
from engine_peers import Peers, checks
from engine_policies import POLICY_ROUNDS, compare
from engine_show import COMPARED, TABLES, append_csv, group_of, summary, table
from report import print_checks, print_rows, write_json

from fairlane.bench.figures import Row, figures, median_run
from fairlane.bench.host_times import HostTimes
from fairlane.bench.loads import Lengths, chat_lengths
from fairlane.bench.run import Bench, OutOfTimeError, RunError
from fairlane.clock import MonotonicClock
from fairlane.config.overrides import override
from fairlane.config.schema import field_at
from fairlane.config.strict import load_file
from fairlane.worker.config import Device, WorkerConfig
from fairlane.worker.executors import make_executor

HERE = Path(__file__).resolve().parent
MODELS = HERE.parent / "configs" / "models"
CPU_KV_CACHE = 64 << 20


class Session:
    """One invocation: what was asked, when it began, and the rows so far."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.peers = Peers()
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self.began_s = time.monotonic()
        self.deadline_s = None if given.budget_s is None else self.began_s + given.budget_s

    @property
    def compares(self) -> bool:
        """Whether the figures are of what the peers did."""
        return bool(self.given.scale == 1 and self.given.device == "cuda")

    @property
    def out_of_time(self) -> bool:
        return self.deadline_s is not None and time.monotonic() > self.deadline_s

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began_s:7.1f} s] {text}", flush=True)

    def fail(self, text: str) -> None:
        self.failures.append(text)
        self.say(f"FAILED {text}")

    def keep(self, row: Row) -> None:
        """A row is done: it is said, kept, and appended to the CSV at once."""
        compared = COMPARED.get(group_of(row), ()) if self.compares else ()
        ratios = self.peers.ratios(row)
        row |= {f"{key} / vllm": ratios[key] for key in compared if key in ratios}
        self.rows.append(row)
        self.say(f"  = {row['model']} {row['row']}: {summary(row)}")
        if self.given.csv is not None:
            append_csv(self.given.csv, row, new=len(self.rows) == 1)


# -- rows ----------------------------------------------------------------------------------------------------------------


def run_case(session: Session, bench: Bench, model: str, case: Case) -> None:
    """Measures one row. Raises RunError when not even one run came to an end."""
    identity = {"model": model, "row": case.id}
    if case.group == "POLICY":
        name = case.id.removeprefix("POLICY-")
        rounds = session.given.policy_rounds
        session.keep(identity | compare(bench, case.load, name, rounds, POLICY_TENANTS, session.deadline_s, session.say))
        return
    if case.group == "IDLE":
        host = HostTimes()
        outcome = bench.run(case.load, host=host, deadline_s=session.deadline_s)
        session.keep(identity | host.figures(*outcome.all_decoding_s))
        return
    runs: list[Row] = []
    for number in range(case.discarded + case.repeats):
        try:
            outcome = bench.run(case.load, seed=number, max_num_seqs=case.max_num_seqs, deadline_s=session.deadline_s)
        except OutOfTimeError as error:
            if not runs:
                raise
            session.say(f"  {model} {case.id}: {error}")
            break
        row = identity | figures(outcome)
        discarded = number < case.discarded
        if not discarded:
            runs.append(row)
        if case.discarded + case.repeats > 1:
            note = "discarded: " if discarded else ""
            session.say(f"    {model} {case.id} run {number + 1}: {note}{summary(row)}")
    session.keep(median_run(runs, case.by) | {"runs": len(runs)})


def run_model(session: Session, model: str, chat: Lengths) -> None:
    given = session.given
    name = model.removesuffix(".json").rpartition("/")[2]
    wanted = chosen(name, cases(name, chat, given.scale, given.repeats), given.only)
    if not wanted:
        session.say(f"{name}: nothing to run of {', '.join(given.only)}")
        return
    began_s = time.monotonic()
    config = worker_config(given, model)
    executor = make_executor(config, MonotonicClock())
    try:
        info = executor.info
        tokens = (info.num_blocks - 1) * info.block_size
        session.say(f"{name}: loaded in {time.monotonic() - began_s:.1f} s, {tokens:,} tokens of KV cache, {device_facts(given)}")
        bench = Bench(executor, config)
        began_s = time.monotonic()
        attempt(session, f"{name} warm-up", lambda: bench.run(warm_up(chat, given.scale), deadline_s=session.deadline_s))
        session.say(f"{name}: warm after {time.monotonic() - began_s:.1f} s")
        for case in wanted:
            if session.out_of_time:
                session.fail(f"{name} {case.id}: not begun, the {given.budget_s:g} s are over")
                continue
            attempt(session, f"{name} {case.id}", partial(run_case, session, bench, name, case))
        session.say(f"{name}: {device_facts(given)}")
    finally:
        executor.close()


def attempt(session: Session, what: str, work: Callable[[], object]) -> None:
    """Whatever goes wrong in one row belongs to that row."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - a bug of the engine that one load shows must not hide the other loads' figures
        kind = "" if isinstance(error, RunError) else f"{type(error).__name__}: "
        session.fail(f"{what}: {kind}{error}")


def worker_config(given: argparse.Namespace, model: str) -> WorkerConfig:
    """The file's settings with the model, the device and what --set says. ConfigError, or ValueError for an unknown key."""
    config = load_file(given.worker_config, WorkerConfig)
    file = Path(model) if model.endswith(".json") else MODELS / f"{model}.json"
    config = replace(config, model=str(file), device=Device(given.device))
    if config.device is Device.CPU:
        config = replace(config, kv_cache=CPU_KV_CACHE)
    flags = dict(pair.split("=", 1) for pair in given.set)
    unknown = [key for key in flags if field_at(WorkerConfig, (key,)) is None]
    if unknown:
        raise ValueError(f"--set: a worker has no {', '.join(unknown)}")
    return override(config, flags)


def device_facts(given: argparse.Namespace) -> str:
    if given.device == "cpu":
        return "on the CPU"
    import torch

    free, total = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_allocated() / 2**30
    return f"{torch.cuda.get_device_name()}, peak {peak:.1f} GiB, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def let_go(given: argparse.Namespace) -> None:
    """Gives a model's memory back before the next one is loaded."""
    gc.collect()
    if given.device == "cuda":
        import torch

        torch.cuda.empty_cache()


# -- the command ---------------------------------------------------------------------------------------------------------


def listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def assignment(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return text


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = "names of configs/models, or config.json files, with commas (default llama-3.1-8b)"
    parser.add_argument("--model", type=listed, nargs="+", default=[["llama-3.1-8b"]], metavar="NAMES", help=models)
    only = "groups or rows, with commas: H1,H2-B32,IDLE (default: what is compared of the model)"
    parser.add_argument("--only", type=listed, default=[], metavar="ROWS", help=only)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scale", type=positive, default=1.0, help="of counts and lengths; only 1 is compared (default 1)")
    parser.add_argument("--repeats", type=int, help="runs a row of H1, H2 and H4 (default 3)")
    parser.add_argument("--policy-rounds", type=int, default=POLICY_ROUNDS, help="of A B B A (default %(default)s)")
    parser.add_argument("--budget-s", type=positive, metavar="N", help="stop after that many seconds")
    parser.add_argument("--worker-config", type=Path, default=HERE / "worker_h200.yaml", metavar="FILE")
    parser.add_argument("--set", type=assignment, action="append", default=[], metavar="KEY=VALUE", help="a worker setting")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment, checks and rows there")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append each row there as soon as it is done")
    return parser.parse_args(argv)


def finish(session: Session) -> None:
    """The tables, the checks and the document; also of a run that was cut short."""
    for group in TABLES:
        found = [row for row in session.rows if group_of(row) == group]
        print_rows(group, table(found))
    verdicts = checks(session.rows, session.peers) if session.compares else []
    if verdicts:
        print_checks(verdicts)
    for failure in session.failures:
        print(f"FAILED {failure}", flush=True)
    write_json(session.given.json, verdicts, session.rows)


def main(argv: list[str] | None = None) -> int:
    """0, or 1 when nothing could be measured."""
    session = Session(arguments(argv))
    given = session.given
    try:
        for model in chain.from_iterable(given.model):
            if session.out_of_time:
                session.fail(f"{model}: not begun, the {given.budget_s:g} s are over")
                continue
            try:
                run_model(session, model, chat_lengths())
            except Exception as error:  # noqa: BLE001 - as above, for a model
                session.fail(f"{model}: {type(error).__name__}: {error}")
            let_go(given)
    finally:
        finish(session)
    return 0 if session.rows else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was measured until then is still written
    sys.exit(main())
