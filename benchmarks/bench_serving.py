"""The whole gateway, from a client's bytes to its tokens: `fairlane serve` under a load that comes over gRPC from processes of
its own, token ids in and out, streaming; and the same load on the same worker settings without a gateway, for the ratio.

    python benchmarks/bench_serving.py --load chat --scale 0.03                SmolLM2 on this CPU, a few short requests
    python benchmarks/bench_serving.py --device cuda --model llama-3.1-8b      random weights on a GPU, the whole chat list
    python benchmarks/bench_serving.py --target HOST:PORT --key-file FILE      a server that runs already (no offline run)

TTFT counts from when the client sends a request, offline from the start of the run; TPOT is of what follows the first message.
The check GRPC (at least 0.95 of the offline rate, nothing failed) is made on a GPU, unscaled, all requests at once: on a CPU the
gateway and the load take cores from the model, so there the ratio is only shown. A refusal or failure is counted in its row.

Exit codes: 0 measured, 1 no request ended well, 2 a bad flag, or no server to measure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import Enum
from multiprocessing.connection import Connection
from pathlib import Path

import bench_engine
import grpc
from bench_engine import HERE, assignment, positive
from engine_loads import PLANS, cases, warm_up
from grpc_health.v1 import health_pb2, health_pb2_grpc
from report import print_checks, print_rows, write_json
from serving_load import CHANNEL_OPTIONS, GRACE_S, NotServingError, Order, drive, failure_of, figures, shared_out

from fairlane.bench.figures import Row, median_run
from fairlane.bench.figures import figures as offline_figures
from fairlane.bench.loads import Load, chat_lengths
from fairlane.bench.results import Check
from fairlane.bench.run import Bench, RunError
from fairlane.clock import MonotonicClock
from fairlane.errors import ConfigError
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from fairlane.protos.fairlane.v1.inference_pb2_grpc import InferenceStub
from fairlane.worker.config import LoadFormat, WorkerConfig
from fairlane.worker.executors import make_executor

REQUIRED = 0.95
LOOK_S = 5.0
TENANT = "bench/load"
# One tenant without caps and one tier in order of arrival, as the offline run has it: the ratio is the gateway's cost alone.
POLICY = """version: 1
scheduler: {tiers: fcfs, within_tier: fcfs}
tiers: {standard: {priority: 50}}
organisations: {bench: {tenants: {load: {tiers: [standard]}}}}
"""
# A step that compiles a kernel may take longer than users are to wait for a hung worker.
GATEWAY = """admin_port: 0
metrics_port: 0
default_max_duration: 1h
drain_grace: 1s
max_concurrent_rpcs: 100000
worker_timeout: 2m
"""
SHOWN = (
    *("row", "via", "requests", "failed", "output_tokens", "wall_s", "out_tok_s"),
    *("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "client_cpus", "grpc / offline", "failures"),
)
Say = Callable[[str], None]


def named_load(name: str, scale: float = 1.0) -> Load:
    """chat, chat-N (its first N requests), or a row of bench_engine.py: H1, H2-B64, H4-1x8000. ValueError for others."""
    chat = chat_lengths()
    if found := re.fullmatch(r"chat(?:-([1-9]\d*))?", name):
        return Load(chat[: int(found[1] or len(chat))]).scaled(scale)
    every = [case for model in PLANS for case in cases(model, chat, scale) if case.max_num_seqs is None]
    loads = {case.id: case.load for case in every if case.group[0] == "H"}
    if name not in loads:
        raise ValueError(f"there is no load {name!r}; there are chat, chat-N, {', '.join(loads)}")
    return loads[name]


# -- the server --------------------------------------------------------------------------------------------------------------


def look_at(target: str, key: str) -> pb.Model:
    """Fails at once where nothing listens. Raises NotServingError unless it is SERVING and takes the key."""
    with grpc.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LOOK_S)
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                raise NotServingError(f"the server at {target} is not SERVING")
            metadata = [("authorization", f"Bearer {key}")]
            stub = InferenceStub(channel)  # type: ignore[no-untyped-call]
            listed: pb.ListModelsResponse = stub.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=LOOK_S)
            return listed.models[0]
        except (grpc.RpcError, IndexError) as error:
            why = f"{failure_of(error)}: {error.details()}" if isinstance(error, grpc.RpcError) else "it lists no model"
            raise NotServingError(f"cannot measure a server at {target}: {why}") from None


@contextmanager
def served(
    folder: Path, config: WorkerConfig, ready_timeout_s: float, policy: str = POLICY
) -> Iterator[tuple[str, dict[str, str]]]:
    """`fairlane serve` with state and files in `folder` (short: sockets lie there too): its address and the tenants' keys. Raises
    NotServingError with its log."""
    values = {name: value.value if isinstance(value, Enum) else value for name, value in asdict(config).items()}
    sizes = {"kv_cache": config.kv_cache, "host_kv_cache": config.host_kv_cache}
    values |= {name: None if size is None else f"{size}B" for name, size in sizes.items()}
    command = [sys.executable, "-m", "fairlane", "serve", "--port", "0", "--ready-timeout", str(ready_timeout_s)]
    command += ["--state-dir", str(folder / "state")]
    for flag, text in {"policy": policy, "config": GATEWAY, "worker-config": json.dumps(values, indent=1)}.items():
        (folder / f"{flag}.yaml").write_text(text)
        command += [f"--{flag}", str(folder / f"{flag}.yaml")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FAIRLANE_")} | {"XDG_RUNTIME_DIR": str(folder)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    late = threading.Timer(ready_timeout_s + GRACE_S, process.kill)
    late.start()
    try:
        log: list[str] = []
        for line in process.stdout or ():
            log.append(line)
            if line.strip() == "Ready.":
                break
        late.cancel()
        address = re.search(r"^\s+inference\s+(\S+)$", "".join(log), re.MULTILINE)
        if address is None or log[-1].strip() != "Ready.":
            raise NotServingError("fairlane serve did not become ready:\n" + "".join(log[-20:]).rstrip())
        threading.Thread(target=log.extend, args=(process.stdout,), daemon=True).start()  # it must not wait for a full pipe
        yield address[1], json.loads((folder / "state" / "demo-keys.json").read_text())["tenants"]
    finally:
        late.cancel()
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def warming(given: argparse.Namespace, max_model_len: int) -> Load:
    """bench_engine.py's, as far as the model's context goes."""
    most = max_model_len // 2
    return Load(tuple((min(p, most), min(o, most)) for p, o in warm_up(chat_lengths(), given.scale).lengths))


def over_grpc(given: argparse.Namespace, target: str, key: str, load: Load, say: Say) -> Row:
    runs: list[Row] = []
    model = look_at(target, key)
    say(f"{model.name} is served at {target}")
    for number in range(given.repeats + 1):  # 0 warms up
        one = load if number else warming(given, model.max_model_len)
        prompts, outputs = one.prompts(model.vocab_size, number), [output for _, output in one.lengths]
        order = Order(target, key, prompts, outputs, given.concurrency, given.timeout)
        rounds = -(-one.num_requests // (given.concurrency or one.num_requests))
        row = figures(one, drive(shared_out(order, given.processes), rounds * given.timeout + GRACE_S, say))
        runs.append(row)
        say(f"grpc {f'run {number}' if number else 'warm-up'}: {summary(row)}")
    return {"row": given.load, "via": "grpc"} | median_run(runs[1:], "out_tok_s") | {"runs": given.repeats}


def offline(given: argparse.Namespace, config: WorkerConfig, load: Load, say: Say) -> Row:
    """In a process of its own, so that nothing of it is here while the server is measured. Raises RunError."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=offline_process, args=(given, config, load, theirs), daemon=True)
    process.start()
    theirs.close()
    runs: list[Row] = []
    try:
        for number in range(given.repeats + 1):
            if not ours.poll(given.timeout + GRACE_S + (0 if number else given.ready_timeout)):
                raise RunError("the offline run did not answer in time")
            row = ours.recv()
            if isinstance(row, str):
                raise RunError(row)
            runs.append(row)
            say(f"offline {f'run {number}' if number else 'warm-up'}: {summary(row)}")
    except (EOFError, OSError):
        raise RunError("the offline process died") from None
    finally:
        process.kill()
        process.join()
    return {"row": given.load, "via": "offline", "failed": 0} | median_run(runs[1:], "out_tok_s") | {"runs": given.repeats}


def offline_process(given: argparse.Namespace, config: WorkerConfig, load: Load, pipe: Connection) -> None:
    """Sends a row per run, the warm-up's first, or a text that says what went wrong."""
    try:
        executor = make_executor(config, MonotonicClock())
        bench = Bench(executor, config)
        for number in range(given.repeats + 1):
            one = load if number else warming(given, executor.info.max_model_len)
            pipe.send(offline_figures(bench.run(one, seed=number, deadline_s=time.monotonic() + given.timeout)))
    except Exception as error:  # noqa: BLE001 - whatever goes wrong here is a line of the report, not the end of it
        pipe.send(f"{type(error).__name__}: {error}")
    pipe.recv()  # until the other side has read all and ends us


def summary(row: Row) -> str:
    ttft = "" if row["ttft_p50_ms"] is None else f", TTFT p50 {row['ttft_p50_ms']:,.0f} ms"
    failed = f"; FAILED {row['failures']}" if row.get("failed") else ""
    return f"{row['output_tokens']:,} tokens in {row['wall_s']:.1f} s, {row['out_tok_s']:,.1f} tokens/s{ttft}{failed}"


# -- the command -------------------------------------------------------------------------------------------------------------


def worker_config(given: argparse.Namespace, folder: Path) -> WorkerConfig:
    """bench_engine.py's, with a file and settings that suit the device; a config.json alone becomes a folder in `folder`."""
    cuda = given.device == "cuda"
    if given.worker_config is None:
        given.worker_config = HERE / "worker_h200.yaml" if cuda else HERE.parent / "configs" / "worker.yaml"
    given.set = ["prefix_caching=false", *([] if cuda else ["kv_cache=256MiB"]), *given.set]
    config = bench_engine.worker_config(given, given.model)
    file = Path(config.model)
    if not file.is_file():
        return replace(config, model=given.model, load_format=LoadFormat(given.load_format or "safetensors"))
    (folder / file.stem).mkdir()
    shutil.copyfile(file, folder / file.stem / "config.json")
    return replace(config, model=str(folder / file.stem), load_format=LoadFormat.DUMMY)


def count(text: str) -> int | None:
    return None if text == "all" else at_least_one(text)


def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--model", default="smollm2", help="an embedded model, a folder, a config.json or a name of configs/models")
    add("--load-format", choices=("safetensors", "dummy"), help="dummy: random weights (always for a config.json)")
    add("--load", default="chat", metavar="NAME", help="chat, chat-N, H1, H2-B64 ... (default %(default)s)")
    add("--scale", type=positive, default=1.0, help="of counts and lengths (default 1)")
    add("--concurrency", type=count, metavar="N|all", help="most requests in flight (default all)")
    add("--processes", type=at_least_one, default=1, help="of the load (default 1); too few if client_cpus is near")
    add("--repeats", type=at_least_one, default=1, help="runs after a warm-up; the median one counts (default 1)")
    add("--timeout", type=positive, default=600.0, metavar="S", help="deadline of a request (default 600)")
    add("--ready-timeout", type=positive, default=600.0, metavar="S", help="for loading the model (default 600)")
    add("--worker-config", type=Path, metavar="FILE")
    add("--set", type=assignment, action="append", default=[], metavar="KEY=VALUE", help="a worker setting")
    add("--target", metavar="HOST:PORT", help="measure this server instead of one of our own")
    add("--key-file", type=Path, metavar="FILE", help="the API key to call it with")
    add("--no-offline", action="store_true", help="do not run the load without a gateway")
    add("--json", type=Path, metavar="FILE", help="write environment, checks and rows there")
    given = parser.parse_args(argv)
    if (given.target is None) != (given.key_file is None):
        parser.error("--target and --key-file go together")
    return given


def measure(given: argparse.Namespace, load: Load, folder: Path, rows: list[Row], say: Say) -> list[Check]:
    if given.target is not None:
        rows.append(over_grpc(given, given.target, given.key_file.read_text().strip(), load, say))
        return []
    config = worker_config(given, folder)
    with served(folder, config, given.ready_timeout) as (target, keys):
        rows.append(over_grpc(given, target, keys[TENANT], load, say))
    if given.no_offline:
        return []
    try:
        rows.append(offline(given, config, load, say))
    except RunError as error:
        say(f"FAILED offline: {error}")
        return []
    online = rows[0]
    ratio = online["grpc / offline"] = online["out_tok_s"] / rows[1]["out_tok_s"]
    if not (given.device == "cuda" and given.scale == 1 and given.concurrency is None):
        return []
    passed, required = ratio >= REQUIRED and not online["failed"], f">= {REQUIRED}, none failed"
    return [Check("GRPC", f"{given.load} over gRPC / offline output rate", ratio, required, "x", passed)]


def main(argv: list[str] | None = None) -> int:
    given, began_s = arguments(argv), time.monotonic()
    rows: list[Row] = []
    checks: list[Check] = []

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began_s:7.1f} s] {text}", flush=True)

    try:
        load = named_load(given.load, given.scale)
        say(f"{given.load}: {load.num_requests} requests, {load.prompt_tokens:,} prompt and {load.output_tokens:,} output tokens")
        with tempfile.TemporaryDirectory(prefix="fl") as folder:
            checks = measure(given, load, Path(folder), rows, say)
    except (NotServingError, ConfigError, ValueError, OSError) as error:
        print(f"bench_serving: {error}", file=sys.stderr, flush=True)
        return 2
    print_rows("serving", [{key: row.get(key) for key in SHOWN} for row in rows])
    print_checks(checks)
    write_json(given.json, checks, rows)
    return 0 if rows[0]["output_tokens"] else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server and the load end with us
    sys.exit(main())
