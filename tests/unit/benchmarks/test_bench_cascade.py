"""A dry run of the cascade benchmark on this CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import bench_cascade

from tiny_shape import TINY


def test_every_row_runs_on_a_tiny_model(tmp_path: Path) -> None:
    model, file = tmp_path / "tiny.json", tmp_path / "out.json"
    model.write_text(json.dumps(TINY))
    code = bench_cascade.main(["--device", "cpu", "--model", str(model), "--scale", "0.02", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    sizes = [(row["sequences"], row["prompts"], row["shared"], row["own"]) for row in rows]
    assert (code, sizes) == (0, [(1, 1, 80, 5), (4, 4, 80, 5), (5, 1, 16, 5), (16, 16, 80, 5), (1, 1, 80, 5)])


def test_sequences_of_a_prompt_have_its_blocks_and_no_others_of_each_other() -> None:
    row = bench_cascade.Row(6, 2, 64, 10)
    tables = [new.block_tables[0] for new in bench_cascade.sequences(row, 16)]
    alike = [table[:4] == tables[slot % 2][:4] for slot, table in enumerate(tables)]
    own = [block for table in tables for block in table[4:]] + tables[0][:4] + tables[1][:4]
    assert all(alike) and len(set(own)) == len(own) and min(own) == 1 and len(tables[0]) == 4 + 4
