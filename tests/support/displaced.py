"""A batch request whose blocks a gold one takes, through a real server."""

from __future__ import annotations

from dataclasses import dataclass

from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from serving import Served

GREEDY = pb.SamplingParams(temperature=0)
# Of the batch request: seconds on a CPU, so that a gold one sent after ten of them comes before the last on a busy machine, too.
MAX_TOKENS = 240


def token_ids(events: list[pb.GenerateEvent]) -> list[int]:
    return [token for event in events for token in event.tokens.token_ids]


@dataclass(frozen=True)
class Displaced:
    """events: what the batch request got. alone: the tokens it gets by itself, 30 past the first eviction."""

    events: list[pb.GenerateEvent]
    alone: list[int]

    @property
    def evictions(self) -> list[pb.Preempted]:
        """Those by which it lost its blocks; pauses are not among them."""
        told = [event.preempted for event in self.events if event.WhichOneof("event") == "preempted"]
        return [preempted for preempted in told if preempted.kind != pb.PREEMPTION_KIND_PAUSED]


def displaced(server: Served, batch: pb.GenerateRequest) -> Displaced:
    """Serves the batch request with MAX_TOKENS, and after ten of them a gold one whose 1,490 tokens fill 94 of the 96 blocks that
    the server must have."""
    asked = pb.GenerateRequest()
    asked.CopyFrom(batch)
    asked.sampling.CopyFrom(GREEDY)
    asked.stopping.CopyFrom(pb.StoppingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    asked.response.CopyFrom(pb.ResponseOptions(return_token_ids=True, lifecycle_events=True))
    gold = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1000 + i for i in range(1490)]),
        sampling=GREEDY,
        stopping=pb.StoppingParams(max_tokens=4, ignore_eos=True),
    )
    events: list[pb.GenerateEvent] = []
    vip = None
    with server.inference() as stub:
        for event in stub.Generate(asked, metadata=server.key("chatly/free")):
            events.append(event)
            if vip is None and len(token_ids(events)) >= 10:
                vip = stub.Generate(gold, metadata=server.key("northwind/checkout"))
        assert vip is not None
        assert list(vip)[-1].WhichOneof("event") == "finished"
        kinds = [event.WhichOneof("event") for event in events]
        before = events[: kinds.index("preempted")] if "preempted" in kinds else []
        asked.stopping.max_tokens = min(MAX_TOKENS, len(token_ids(before)) + 30)
        alone = token_ids(list(stub.Generate(asked, metadata=server.key("chatly/free"))))
    return Displaced(events, alone)
