"""Decode steps of sequences that share cached prompts, with `cascade` and without: what a step takes on the device, in a model of
random weights. Steps are written by hand; sequences get the blocks of their prompt as a prefix hit would give them.

    python benchmarks/bench_cascade.py [--model llama-3.1-8b] [--json FILE]
    python benchmarks/bench_cascade.py --device cpu --model tiny.json --scale 0.02      a dry run on any machine
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from report import print_rows, write_json

from fairlane.clock import MonotonicClock
from fairlane.config.strict import load_file
from fairlane.scheduler.executor import Executor
from fairlane.scheduler.output import NewSequence, ScheduledSequence, ScheduleOutput
from fairlane.scheduler.request import SamplingParams
from fairlane.worker.config import Device, WorkerConfig
from fairlane.worker.executors import make_executor

HERE = Path(__file__).resolve().parent
MODELS = HERE.parent / "configs" / "models"
GREEDY = asdict(SamplingParams(temperature=0.0))
STEPS, DISCARDED = 40, 8


@dataclass(frozen=True)
class Row:
    """So many sequences, as many of each prompt; prompts of `shared` tokens, whole blocks, and `own` tokens behind them."""

    sequences: int
    prompts: int
    shared: int
    own: int

    def scaled(self, scale: float, block_size: int) -> Row:
        shared = max(block_size, int(self.shared * scale) // block_size * block_size)
        return Row(max(self.prompts, int(self.sequences * scale)), self.prompts, shared, max(1, int(self.own * scale)))


ROWS = (Row(64, 1, 4096, 256), Row(64, 4, 4096, 256), Row(256, 1, 1024, 256), Row(256, 16, 4096, 256), Row(8, 1, 4096, 256))


def sequences(row: Row, block_size: int) -> list[NewSequence]:
    """With room for the tokens of all steps."""
    free = count(1)
    common = [[next(free) for _ in range(row.shared // block_size)] for _ in range(row.prompts)]
    own_blocks = -(-(row.own + STEPS + 1) // block_size)
    made = []
    for slot in range(row.sequences):
        prompt = slot % row.prompts
        tokens = [(7 * at + prompt) % 90 for at in range(row.shared)] + [(slot + at) % 90 for at in range(row.own)]
        table = common[prompt] + [next(free) for _ in range(own_blocks)]
        made.append(NewSequence(slot, tokens, len(tokens), [table], GREEDY))
    return made


def prompt_steps(row: Row, every: Sequence[NewSequence], budget: int) -> Iterator[ScheduleOutput]:
    """The prompts, then what each sequence has of its own."""
    for number, new in enumerate(every[: row.prompts]):
        for start in range(0, row.shared, budget):
            chunk = ScheduledSequence(new.slot, start, min(budget, row.shared - start), False)
            yield ScheduleOutput(number, new=[new] if start == 0 else [], scheduled=[chunk])
    at_once = max(1, budget // row.own)
    for first in range(0, len(every), at_once):
        some = every[first : first + at_once]
        tails = [ScheduledSequence(new.slot, row.shared, row.own, True) for new in some]
        yield ScheduleOutput(0, new=[new for new in some if new.slot >= row.prompts], scheduled=tails)


def step_ms(executor: Executor, row: Row, budget: int) -> float:
    """The median of the row's decode steps."""
    every = sequences(row, executor.info.block_size)
    for output in prompt_steps(row, every, budget):
        executor.result(executor.launch(output))
    slots, took, ahead = [new.slot for new in every], [], None
    for number in range(STEPS):
        handle = executor.launch(ScheduleOutput(number, decode_slots=slots))
        if ahead is not None:
            took.append(executor.result(ahead).elapsed_s)
        ahead = handle
    took.append(executor.result(ahead).elapsed_s)
    executor.result(executor.launch(ScheduleOutput(0, released_slots=slots)))
    return 1000 * median(took[DISCARDED:])


def measured(config: WorkerConfig, rows: Sequence[Row]) -> list[float]:
    executor = make_executor(config, MonotonicClock())
    try:
        return [step_ms(executor, row, config.max_num_batched_tokens) for row in rows]
    finally:
        executor.close()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a file of configs/models, or a JSON file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(words)
    config = load_file(HERE / "worker_h200.yaml", WorkerConfig)
    model = given.model if given.model.endswith(".json") else str(MODELS / f"{given.model}.json")
    config = replace(
        config, model=model, device=Device(given.device), prefix_caching=True, max_num_seqs=256, max_num_resident=256
    )
    rows = [row.scaled(given.scale, config.block_size) if given.scale != 1 else row for row in ROWS]
    blocks = max(max(new.block_tables[0][-1] for new in sequences(row, config.block_size)) for row in rows)
    config = replace(config, kv_cache=None, num_blocks=blocks + 1)
    with_, without = (measured(replace(config, cascade=cascade), rows) for cascade in (True, False))
    table: list[dict[str, Any]] = [
        asdict(row) | {"ms a step": one, "without cascade": other, "x": other / one}
        for row, one, other in zip(rows, with_, without, strict=True)
    ]
    print_rows(f"decode steps of {Path(model).stem}", table)
    write_json(given.json, [], table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
