"""The loads H1 to H4 that bench_engine.py runs: how many requests of which lengths, how often, and which run of several counts.
What other engines do with the same loads is engine_peers.py's; how a load is run is fairlane.bench.run's.

    H1   one request, 128 in, 256 out                              median of three by output tokens/s, after a discarded one
    H2   B requests at once, 512 in, 128 out                       median of three by output tokens/s
    H3   the 512 requests of the chat list at once                 one run
    H4   prefill, one token out: 1 x 8000, 8 x 2000                median of three by the last first token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fairlane.bench.loads import Lengths, Load, uniform

GROUPS = ("H1", "H2", "H3", "H4", "IDLE", "POLICY")
BATCHES = (8, 32, 64, 128, 256)
IDLE_BATCHES = (32, 256)
POLICY_TENANTS = 100


@dataclass(frozen=True, slots=True)
class Case:
    """One row. repeats runs are counted after `discarded` ones, and the one with the median of `by` is the row.

    max_num_seqs: below the worker's own, for a row that compares with a peer's setting; None: the worker's.
    """

    id: str
    load: Load
    repeats: int = 1
    discarded: int = 0
    by: str = "out_tok_s"
    max_num_seqs: int | None = None

    @property
    def group(self) -> str:
        return self.id.split("-")[0]


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What is run of a model unless --only says otherwise, and which sizes of H2."""

    groups: tuple[str, ...] = ("H1", "H2", "H3", "H4", "IDLE")
    batches: tuple[int, ...] = BATCHES
    chat_parts: tuple[int, ...] = ()
    chat_seqs: tuple[int, ...] = (256,)


PLANS = {
    "llama-3.1-8b": ModelPlan(),
    "qwen3-0.6b": ModelPlan(groups=("H1", "H2", "IDLE"), batches=(1, 64, 256)),
    "llama-2-7b": ModelPlan(groups=("H3",), chat_parts=(128, 32), chat_seqs=()),
}


def cases(model: str, chat: Lengths, scale: float = 1.0, repeats: int | None = None) -> list[Case]:
    """Every row that a model has, H1 to IDLE and POLICY, in the order they are run. repeats, if given, for those that are
    run more than once."""
    plan, times = PLANS.get(model, ModelPlan()), repeats or 3
    found = [Case("H1", uniform(1, 128, 256), times, 1)]
    found += [Case(f"H2-B{batch}", uniform(batch, 512, 128), times) for batch in plan.batches]
    found += [Case("H4-1x8000", uniform(1, 8000, 1), times, by="ttft_last_ms")]
    found += [Case("H4-8x2000", uniform(8, 2000, 1), times, by="ttft_last_ms")]
    found += [Case(f"IDLE-B{batch}", uniform(batch, 512, 128)) for batch in IDLE_BATCHES]
    found += [Case(f"H3-{len(chat)}", Load(chat))]
    found += [Case(f"H3-{len(chat)}-{seqs}seqs", Load(chat), max_num_seqs=seqs) for seqs in plan.chat_seqs]
    found += [Case(f"H3-{part}", Load(chat[:part])) for part in plan.chat_parts]
    found += [Case(f"POLICY-{policy}", Load(chat)) for policy in ("VIP", "FAIR")]
    return [Case(c.id, c.load.scaled(scale), c.repeats, c.discarded, c.by, c.max_num_seqs) for c in found]


def chosen(model: str, every: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """Those that `only` names by group or by the beginning of the id ("H2", "H2-B32"); with nothing named, the model's plan.

    Raises ValueError for a name that is no group's; a group's row that the model does not have is left out.
    """
    unknown = [name for name in only if name.split("-")[0] not in GROUPS]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such row; groups are {', '.join(GROUPS)}")
    names = only or PLANS.get(model, ModelPlan()).groups
    return [case for case in every if any(case.id == name or case.id.startswith(f"{name}-") for name in names)]


def warm_up(chat: Lengths, scale: float) -> Load:
    """Run once and thrown away, so that no row pays for what is compiled or initialised on first use: chat prompts that mix
    with decodes, and one long prompt."""
    return Load((*((prompt, min(output, 16)) for prompt, output in chat[:32]), (8000, 2))).scaled(scale)
