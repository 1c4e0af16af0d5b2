"""A real `fairlane serve` with host memory for preempted requests: one that is swapped out says so, goes on with the same tokens,
computes nothing again, and status shows it."""

from __future__ import annotations

from pathlib import Path

from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from serving import serving

GREEDY = pb.SamplingParams(temperature=0)


def of_length(num_prompt_tokens: int, max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1000 + i for i in range(num_prompt_tokens)]),
        sampling=GREEDY,
        stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        response=pb.ResponseOptions(return_token_ids=True, lifecycle_events=True),
    )


def token_ids(events: list[pb.GenerateEvent]) -> list[int]:
    return [token for event in events for token in event.tokens.token_ids]


def test_a_request_whose_blocks_a_gold_one_takes_is_swapped_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "worker.yaml").write_text("num_blocks: 97\nhost_kv_cache: 64MiB\nprefix_caching: false\nmax_num_seqs: 16\n")
    batch, gold = of_length(200, 80), of_length(1490, 4)
    with serving(tmp_path, "--worker-config", str(tmp_path / "worker.yaml")) as server, server.inference() as stub:
        alone = list(stub.Generate(batch, metadata=server.key("chatly/free")))
        events: list[pb.GenerateEvent] = []
        vip = None
        for event in stub.Generate(batch, metadata=server.key("chatly/free")):
            events.append(event)
            if vip is None and len(token_ids(events)) >= 10:
                vip = stub.Generate(gold, metadata=server.key("northwind/checkout"))
        assert vip is not None and list(vip)[-1].WhichOneof("event") == "finished"
        worker = server.status().worker
    kinds = [event.preempted.kind for event in events if event.WhichOneof("event") == "preempted"]
    usage = events[-1].finished.usage
    assert kinds == [pb.PREEMPTION_KIND_SWAPPED] and token_ids(events) == token_ids(alone)
    assert (usage.preemptions, usage.recomputed_tokens, worker.swaps_out, worker.swaps_in, worker.host_blocks_used) == (
        1,
        0,
        1,
        1,
        0,
    )
    # SmolLM2: 30 layers, keys and values, 3 heads, 16 slots, 64 values of 4 bytes.
    assert worker.host_blocks_total == (64 << 20) // (30 * 2 * 3 * 16 * 64 * 4)
