"""`fairlane profile` and `fairlane bench` on the embedded model, as a user who has just pulled it runs them."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from fairlane import embedded
from fairlane.cli import app


def test_the_embedded_model_is_profiled_and_measured(tmp_path: Path) -> None:
    embedded.pull("smollm2")
    trace, figures = tmp_path / "trace.json", tmp_path / "figures.json"
    common = ["--device", "cpu", "--set", "kv_cache=64MiB"]
    profiled = CliRunner().invoke(
        app, ["profile", *common, "--batch", "2", "--context", "16", "--steps", "2", "--out", str(trace)]
    )
    measured = CliRunner().invoke(app, ["bench", *common, "--run", "2x16x4", "--json", str(figures)])
    linears = sum("_linear_pointwise" in event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"])
    row = json.loads(figures.read_text())["rows"][0]
    seen = (profiled.exit_code, measured.exit_code, row["model"], row["output_tokens"], row["out_tok_s"] > 0)
    assert (seen, linears >= 2 * 4 * 30) == ((0, 0, "smollm2", 8, True), True)  # two steps of thirty layers
