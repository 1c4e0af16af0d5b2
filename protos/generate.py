"""Generates the Python code of every .proto below this folder, beside it.

protoc writes absolute imports (`from fairlane.v1 import x_pb2`), which would collide with the `fairlane` package; they
become imports inside `fairlane.protos`. Run by `make protos`; `make protos-check` fails when the committed code differs.
"""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).resolve().parent
WELL_KNOWN = files("grpc_tools") / "_proto"  # google/protobuf/*.proto
IMPORT = re.compile(r"^from fairlane\.v1 import (\w+) as", re.MULTILINE)


def generate(out: Path) -> list[Path]:
    """Generates into `out` (mirroring fairlane/v1/) and returns the files written."""
    sources = sorted(str(p.relative_to(HERE)) for p in HERE.glob("fairlane/v1/*.proto"))
    arguments = [f"-I{HERE}", f"-I{WELL_KNOWN}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}", *sources]
    if protoc.main(["protoc", *arguments]) != 0:
        raise SystemExit("protoc failed; its message is above")
    written = sorted([*out.glob("fairlane/v1/*_pb2*.py"), *out.glob("fairlane/v1/*_pb2.pyi")])
    for path in written:
        path.write_text(IMPORT.sub(r"from fairlane.protos.fairlane.v1 import \1 as", path.read_text()))
    return written


if __name__ == "__main__":
    for path in generate(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else HERE):
        print(path)
