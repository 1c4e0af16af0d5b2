"""A real `fairlane serve`: a request that a cap holds up is explained to its tenant, and to an operator on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fairlane.protos.fairlane.v1 import explain_pb2
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from serving import serving

POLICY = """version: 1
tiers: {batch: {priority: 1}}
organisations: {acme: {tenants: {shop: {tiers: [batch], max_running: 1}}}}
"""


def of_length(name: str, max_tokens: int) -> pb.GenerateRequest:
    stopping = pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1000, 1001]), stopping=stopping, request_id=name)


def test_a_request_held_up_by_a_cap_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text(POLICY)
    with serving(tmp_path, "--policy", str(tmp_path / "tenants.yaml")) as server, server.inference() as stub:
        key = server.key("acme/shop")
        running = stub.Generate(of_length("request-1", 2000), metadata=key)
        assert [next(running).WhichOneof("event") for _ in range(2)] == ["queued", "started"]
        waiting = stub.Generate(of_length("request-2", 2), metadata=key)
        assert next(waiting).WhichOneof("event") == "queued"
        found = stub.Explain(pb.ExplainRequest(request_id="request-2"), metadata=key, timeout=10)
        command = [sys.executable, "-m", "fairlane", "requests", "explain", "acme/shop", "request-2"]
        target = f"127.0.0.1:{server.port + 1}"
        shown = subprocess.run(
            [*command, "--target", target], env=server.environment(), capture_output=True, text=True, check=False
        )
        running.cancel()
        rest = [event.WhichOneof("event") for event in waiting]
    assert (list(found.reasons), [(cap.node, cap.limit) for cap in found.caps], found.rank) == (
        [explain_pb2.Explanation.REASON_CAP], [("acme/shop", 1)], 1,
    )  # fmt: skip
    assert ("cap: acme/shop runs 1, its max_running is 1" in shown.stdout, shown.stderr) == (True, "")
    assert rest[-1] == "finished"


CEIL = """version: 1
tiers: {batch: {priority: 1}}
organisations: {acme: {ceil: 3%, tenants: {shop: {tiers: [batch]}}}}
"""


def test_a_tenant_gets_its_ceil_of_an_idle_worker_and_is_told_so(tmp_path: Path) -> None:
    """A step takes milliseconds, so the ceil binds for seconds. Every token comes all the same, with its stalls told."""
    (tmp_path / "tenants.yaml").write_text(CEIL)
    with serving(tmp_path, "--policy", str(tmp_path / "tenants.yaml")) as server, server.inference() as stub:
        key = server.key("acme/shop")
        asked = of_length("request-1", 4)
        asked.response.lifecycle_events = True
        paused = stub.Generate(asked, metadata=key)
        told = [next(paused).WhichOneof("event") for _ in range(2)]
        waiting = stub.Generate(of_length("request-2", 1), metadata=key)
        told.append(next(waiting).WhichOneof("event"))
        found = stub.Explain(pb.ExplainRequest(request_id="request-2"), metadata=key, timeout=10)
        events = list(paused)
        waiting.cancel()
    (ceil,) = found.ceilings
    assert told == ["queued", "started", "queued"]
    assert (list(found.reasons), ceil.node, ceil.share) == ([explain_pb2.Explanation.REASON_CEIL], "acme", 0.03)
    reasons = {event.preempted.reason for event in events if event.WhichOneof("event") == "preempted"}
    usage = events[-1].finished.usage
    assert (reasons, usage.completion_tokens) == ({pb.PREEMPTION_REASON_CEIL}, 4)
