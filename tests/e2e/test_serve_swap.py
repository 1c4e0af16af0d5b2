"""A real `fairlane serve` with host memory for preempted requests: one that is swapped out says so, goes on with the same tokens,
computes nothing again, and status shows it."""

from __future__ import annotations

from pathlib import Path

from displaced import displaced, token_ids
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from serving import serving


def test_a_request_whose_blocks_a_gold_one_takes_is_swapped_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "worker.yaml").write_text("num_blocks: 97\nhost_kv_cache: 64MiB\nprefix_caching: false\nmax_num_seqs: 16\n")
    batch = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1000 + i for i in range(200)]))
    with serving(tmp_path, "--worker-config", str(tmp_path / "worker.yaml")) as server:
        got = displaced(server, batch)
        worker = server.status().worker
    usage = got.events[-1].finished.usage
    assert [preempted.kind for preempted in got.evictions] == [pb.PREEMPTION_KIND_SWAPPED]
    assert token_ids(got.events)[: len(got.alone)] == got.alone
    assert (usage.preemptions, usage.recomputed_tokens, worker.swaps_out, worker.swaps_in, worker.host_blocks_used) == (
        1,
        0,
        1,
        1,
        0,
    )
    # SmolLM2: 30 layers, keys and values, 3 heads, 16 slots, 64 values of 4 bytes.
    assert worker.host_blocks_total == (64 << 20) // (30 * 2 * 3 * 16 * 64 * 4)
