"""The load that the serving benchmark puts on a server: which requests it has, its arithmetic, its part over real gRPC against a
scripted server, and what happens when there is no server."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_serving  # noqa: E402 - benchmarks/ is no package: its scripts run from their own folder
from serving_load import LOST, NO_ANSWER, Answer, Driven, Order, drive, figures, shared_out  # noqa: E402

from fairlane.bench.loads import Load, chat_lengths, uniform  # noqa: E402
from fairlane.gateway.policy.loader import load_policy_file  # noqa: E402
from fairlane.protos.fairlane.v1 import inference_pb2 as pb  # noqa: E402
from fairlane.protos.fairlane.v1 import inference_pb2_grpc as rpc  # noqa: E402
from fairlane.worker.config import LoadFormat  # noqa: E402

# -- loads ---------------------------------------------------------------------------------------------------------------


def test_loads_are_those_of_the_engine_benchmark() -> None:
    assert bench_serving.named_load("chat") == Load(chat_lengths())
    assert bench_serving.named_load("chat-7") == Load(chat_lengths()[:7])
    assert bench_serving.named_load("H2-B64") == uniform(64, 512, 128)
    assert bench_serving.named_load("H2-B8", scale=0.5) == uniform(4, 256, 64)


def test_the_same_load_and_seed_give_the_same_prompts() -> None:
    first, again = (bench_serving.named_load("chat", 0.03) for _ in range(2))
    assert first.num_requests == 15
    assert first.prompts(49152, 1) == again.prompts(49152, 1) != again.prompts(49152, 2)


@pytest.mark.parametrize("name", ["nix", "chat-0", "IDLE-B32", "POLICY-VIP", "H3-512-256seqs"])
def test_a_load_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(ValueError, match=f"no load '{name}'; there are chat, chat-N, H1, H2-B8"):
        bench_serving.named_load(name)


def test_a_load_is_shared_out_whole_and_its_concurrency_with_it() -> None:
    order = Order("t", "k", [(n,) for n in range(5)], [10, 11, 12, 13, 14], 3, 1.0)
    one, two = shared_out(order, 2)
    assert (one.prompts, one.outputs, one.concurrency) == ([(0,), (2,), (4,)], [10, 12, 14], 1)
    assert (two.prompts, two.outputs, two.concurrency) == ([(1,), (3,)], [11, 13], 2)
    assert len(shared_out(order, 100)) == 3  # none without a request in flight
    assert "fl_secret" not in repr(Order("t", "fl_secret", [], [], None, 1.0))


# -- figures -------------------------------------------------------------------------------------------------------------


def test_figures_by_hand() -> None:
    answers = [
        Answer(sent_s=10.0, first_s=10.1, last_s=11.1, ended_s=11.2, first_tokens=1, num_tokens=11, messages=9),  # 100 ms each
        Answer(sent_s=10.5, first_s=10.8, last_s=11.8, ended_s=12.0, first_tokens=1, num_tokens=6, messages=4),  # 200 ms each
        Answer(sent_s=10.0, first_s=10.9, last_s=10.9, ended_s=11.0, first_tokens=1, num_tokens=1, messages=3),  # has no TPOT
        Answer(sent_s=10.0, ended_s=14.0, num_tokens=90, failure="RESOURCE_EXHAUSTED QUEUE_FULL"),
    ]
    row = figures(Load(((5, 11), (5, 6), (5, 1), (5, 99))), Driven(10.0, answers, cpu_s=1.0))
    assert (row["requests"], row["failed"], row["failures"]) == (4, 1, "1 x RESOURCE_EXHAUSTED QUEUE_FULL")
    assert (row["prompt_tokens"], row["output_tokens"], row["messages"]) == (20, 18, 16)
    assert row["wall_s"] == pytest.approx(4.0)
    assert row["out_tok_s"] == pytest.approx(18 / 4)
    assert row["client_cpus"] == pytest.approx(0.25)
    assert row["ttft_p50_ms"] == pytest.approx(300)  # of 100, 300, 900
    assert row["ttft_p90_ms"] == pytest.approx(300 + 0.8 * 600)
    assert row["ttft_p99_ms"] == pytest.approx(300 + 0.98 * 600)
    assert row["tpot_p50_ms"] == pytest.approx(150)  # of 100, 200
    assert row["tpot_p99_ms"] == pytest.approx(199)


def test_a_run_of_which_nothing_came_has_a_row_too() -> None:
    row = figures(uniform(2, 3, 4), Driven(10.0, [Answer(failure=NO_ANSWER), Answer(failure=LOST)]))
    assert (row["failed"], row["failures"]) == (2, f"1 x {NO_ANSWER}, 1 x {LOST}")
    assert (row["output_tokens"], row["out_tok_s"], row["ttft_p50_ms"], row["tpot_p99_ms"]) == (0, 0.0, None, None)


# -- over gRPC -----------------------------------------------------------------------------------------------------------


class Scripted(rpc.InferenceServicer):
    """Gives as many tokens as were asked for, or as the prompt's first id says: 1 one too few, 2 a refusal, 3 never ends."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.lock = threading.Lock()
        self.calls: list[pb.GenerateRequest] = []
        self.in_flight = self.most_in_flight = 0

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateEvent]:
        with self.lock:
            self.calls.append(request)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if dict(context.invocation_metadata())["authorization"] != "Bearer fl_k":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "whose key is it?")
            yield from self._answer(request, context)
        finally:
            with self.lock:
                self.in_flight -= 1

    def _answer(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateEvent]:
        kind, wanted = request.token_ids.ids[0], request.stopping.max_tokens
        if kind == 2:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
        yield pb.GenerateEvent(seq=0, queued=pb.Queued())
        yield pb.GenerateEvent(seq=1, tokens=pb.Tokens(token_ids=[7], num_tokens=1))
        if kind == 3:
            self.ended.wait(60)
        rest = [7] * (wanted - 1 - (kind == 1))
        yield pb.GenerateEvent(seq=2, tokens=pb.Tokens(token_ids=rest, num_tokens=len(rest)))
        yield pb.GenerateEvent(seq=3, finished=pb.Finished())


@contextmanager
def scripted() -> Iterator[tuple[Scripted, str]]:
    servicer = Scripted()
    with ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool)
        rpc.add_InferenceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield servicer, f"127.0.0.1:{port}"
        finally:
            servicer.ended.set()
            server.stop(0).wait()


def test_each_request_gets_what_became_of_it() -> None:
    with scripted() as (servicer, target):
        order = Order(target, "fl_k", [(0, 5), (1, 5), (2, 5), (3, 5), (0, 6)], [4, 5, 4, 4, 1], None, 2.0)
        driven = drive([order], 60.0, lambda _: None)
    assert [answer.failure for answer in driven.answers] == [
        "",
        "SHORT 4 of 5 tokens",
        "RESOURCE_EXHAUSTED",
        "DEADLINE_EXCEEDED",
        "",
    ]
    first = driven.answers[0]
    assert (first.num_tokens, first.first_tokens, first.messages) == (4, 1, 4)
    assert driven.start_s <= first.sent_s <= first.first_s <= first.last_s <= first.ended_s
    asked = next(call for call in servicer.calls if list(call.token_ids.ids) == [0, 5])
    assert asked.sampling.temperature == 0.0 and asked.sampling.HasField("temperature")
    assert (asked.stopping.max_tokens, asked.stopping.ignore_eos, asked.response.return_token_ids) == (4, True, True)


def test_no_more_than_the_concurrency_are_in_flight_and_answers_keep_their_order() -> None:
    with scripted() as (servicer, target):
        order = Order(target, "fl_k", [(0, n) for n in range(12)], list(range(2, 14)), 2, 30.0)
        driven = drive(shared_out(order, 2), 60.0, lambda _: None)
    assert not any(answer.failure for answer in driven.answers)
    assert [answer.num_tokens for answer in driven.answers] == [2, 4, 6, 8, 10, 12, 3, 5, 7, 9, 11, 13]
    assert servicer.most_in_flight <= 2
    assert len(servicer.calls) == 12


def test_a_load_that_outlives_its_limit_is_cut_and_counted() -> None:
    with scripted() as (_, target):
        driven = drive([Order(target, "fl_k", [(3, 5), (3, 6)], [4, 4], None, 300.0)], 1.0, lambda _: None)
    assert [answer.failure for answer in driven.answers] == [NO_ANSWER, NO_ANSWER]


# -- no server -----------------------------------------------------------------------------------------------------------


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_server_that_is_not_there_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("fl_secret\n")
    target = f"127.0.0.1:{closed_port()}"
    assert bench_serving.main(["--target", target, "--key-file", str(key_file), "--load", "chat-1"]) == 2
    said = capsys.readouterr()
    assert f"cannot measure a server at {target}: UNAVAILABLE" in said.err
    assert "fl_secret" not in said.err + said.out


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--load", "nix"], "there is no load 'nix'"),
        (["--set", "nix=1"], "a worker has no nix"),
        (["--model", "/nowhere"], "no model at '/nowhere'"),
        (["--target", "127.0.0.1:1", "--key-file", "/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_measured_is_said(flags: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_serving.main(flags) == 2
    assert why in capsys.readouterr().err


# -- settings ------------------------------------------------------------------------------------------------------------


def test_the_policy_it_writes_is_valid_and_has_no_caps(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(bench_serving.POLICY)
    policy = load_policy_file(file)
    assert bench_serving.TENANT in policy.nodes_without_keys()
    assert not policy.warnings


def test_a_config_file_alone_becomes_a_folder_with_random_weights(tmp_path: Path) -> None:
    given = bench_serving.arguments(["--model", "qwen3-0.6b", "--set", "kv_cache=8MiB"])
    config = bench_serving.worker_config(given, tmp_path)
    assert (config.load_format, config.kv_cache, config.prefix_caching) == (LoadFormat.DUMMY, 8 << 20, False)
    assert json.loads((Path(config.model) / "config.json").read_text())["model_type"] == "qwen3"
