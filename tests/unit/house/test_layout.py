"""The folder layout and the import rules, checked on the real files: which package may import what, one namespace only, and
no construct that would run code out of data. CONTRIBUTING.md says why."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("gateway", "scheduler", "blockmgr", "kernels", "worker", "protos", "configs")
MAX_LINES = 450


def is_generated(path: Path) -> bool:
    return path.name.endswith(("_pb2.py", "_pb2_grpc.py"))


@cache
def sources() -> tuple[Path, ...]:
    """Every Python file that we write, except tests."""
    tops = [ROOT / name for name in (*FOLDERS, "benchmarks", "examples")] + [ROOT / "src" / "fairlane"]
    found = [path for top in tops for path in top.rglob("*.py")]
    return tuple(sorted(path for path in found if not is_generated(path) and not path.is_symlink()))


def package(path: Path) -> str:
    """gateway, scheduler, ... for the top-level folders; cli, config, or the module's name for what is in src/fairlane."""
    inside = path.relative_to(ROOT / "src" / "fairlane" if path.is_relative_to(ROOT / "src") else ROOT)
    return inside.parts[0].removesuffix(".py")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path, *, typing_too: bool = True) -> Iterator[tuple[str, ast.AST, bool]]:
    """Imported modules, the statement, and whether it runs when the module is imported."""

    def walk(node: ast.AST, at_top: bool) -> Iterator[tuple[str, ast.AST, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING" and not typing_too:
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, child, at_top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                module = child.module or ""
                yield module, child, at_top
                yield from ((f"{module}.{alias.name}", child, at_top) for alias in child.names)
            else:
                yield from walk(child, at_top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    yield from walk(tree(path), True)


def matches(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def offenders(folder: str, names: tuple[str, ...], *, typing_too: bool = True) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {module}"
        for path in sources()
        if package(path) == folder
        for module, _, _ in imports(path, typing_too=typing_too)
        if matches(module, names)
    ]


ML = ("torch", "triton", "transformers", "safetensors", "gguf")
NETWORK = ("grpc", "redis", "google", "aiohttp", "httpx", "requests")
IMPURE = ("numpy", "yaml", "asyncio", "pydantic")


def ours(*names: str) -> tuple[str, ...]:
    return tuple(f"fairlane.{name}" for name in names)


@pytest.mark.parametrize("name", FOLDERS)
def test_each_folder_is_in_the_namespace_by_a_relative_symlink(name: str) -> None:
    link = ROOT / "src" / "fairlane" / name
    assert (link.is_symlink(), str(link.readlink()), link.resolve()) == (True, f"../../{name}", ROOT / name)


def test_kernels_is_a_namespace_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("scheduler", (*ML, *NETWORK, *IMPURE, *ours("gateway", "worker", "kernels", "protos"))),
        ("blockmgr", (*ML, *NETWORK, *IMPURE, *ours("scheduler", "gateway", "worker", "kernels", "protos"))),
        ("kernels", (*NETWORK, "yaml", "pydantic", *ours("scheduler", "gateway", "worker", "blockmgr", "protos"))),
        ("gateway", (*ML, "pydantic", *ours("worker", "kernels", "blockmgr"), "fairlane.cli")),
        ("worker", ("pydantic", "redis", *ours("gateway"), "fairlane.cli")),
        ("protos", ours("scheduler", "gateway", "worker", "blockmgr", "kernels")),
        ("bench", (*NETWORK, "pydantic", *ours("gateway", "protos"), "fairlane.cli")),
        ("config", (*ML, *NETWORK, "pydantic", *ours(*FOLDERS))),
    ],
)
def test_a_folder_imports_only_what_the_design_allows(folder: str, forbidden: tuple[str, ...]) -> None:
    assert offenders(folder, forbidden) == []


def test_the_rules_see_imports_where_there_are_some() -> None:
    assert (offenders("worker", ("torch",)) != [], offenders("gateway", ("grpc",)) != [], offenders("cli", ("typer",)) != []) == (
        True, True, True,
    )  # fmt: skip


def test_there_are_files_to_check_in_every_python_folder() -> None:
    assert {"gateway", "scheduler", "blockmgr", "kernels", "worker", "protos", "config", "cli"} <= {package(p) for p in sources()}


def test_the_command_line_imports_lazily() -> None:
    # cli/run.py is imported by `fairlane serve` alone, inside its function.
    allowed = {*sys.stdlib_module_names, "typer", "fairlane"}
    heavy = [
        f"{path.name}: {module}"
        for path in sources()
        if package(path) == "cli" and path.name != "run.py"
        for module, _, at_top in imports(path, typing_too=False)
        if at_top and module != "fairlane.__version__"
        if module.split(".")[0] not in allowed
        or matches(module, ("fairlane.cli.run",))
        or (module.startswith("fairlane.") and not matches(module, ("fairlane.cli",)))
    ]  # fmt: skip
    assert heavy == []


def test_no_module_is_imported_by_its_bare_folder_name() -> None:
    everything = [*sources(), *(ROOT / "tests").rglob("*.py")]
    bare = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in everything
        for module, statement, _ in imports(path)
        if matches(module, FOLDERS) and not (isinstance(statement, ast.ImportFrom) and statement.level)
    ]
    assert bare == []


def test_ruff_bans_the_same_bare_names() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(settings["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]) == set(FOLDERS)


def test_no_file_is_longer_than_anyone_reads() -> None:
    long = {str(p.relative_to(ROOT)): lines for p in sources() if (lines := len(p.read_text().splitlines())) > MAX_LINES}
    assert long == {}


def test_every_file_opens_by_saying_what_it_decides() -> None:
    silent = [str(p.relative_to(ROOT)) for p in sources() if p.read_text().strip() and ast.get_docstring(tree(p)) is None]
    assert silent == []


FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "marshal.loads"}
FORBIDDEN_MODULES = ("pickle", "cloudpickle", "dill", "marshal", "shelve")


def test_nothing_runs_code_out_of_data() -> None:
    found = []
    for path in sources():
        name = path.relative_to(ROOT)
        found += [f"{name}: import {module}" for module, _, _ in imports(path) if matches(module, FORBIDDEN_MODULES)]
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call):
                continue
            if ast.unparse(node.func) in FORBIDDEN_CALLS:
                found.append(f"{name}:{node.lineno}: {ast.unparse(node.func)}")
            for keyword in node.keywords:
                trusted = keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False"
                shell = keyword.arg == "shell" and ast.unparse(keyword.value) != "False"
                if trusted or shell:
                    found.append(f"{name}:{node.lineno}: {keyword.arg}")
    assert found == []


def test_an_installed_package_called_kernels_still_wins(tmp_path: Path) -> None:
    # transformers imports Hugging Face's `kernels` when it is installed; our folder must never be taken for it, not even
    # with the repository's root on the path before it.
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("WHO = 'installed'")
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'src')!r}, {str(tmp_path)!r}]\n"
        "import kernels, fairlane.kernels\n"
        "print(kernels.WHO, [str(p) for p in fairlane.kernels.__path__][0].endswith('src/fairlane/kernels'))"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (run.stdout.strip(), run.stderr) == ("installed True", "")


def test_the_gateway_and_the_scheduler_really_load_without_torch() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        "import fairlane.gateway.server, fairlane.scheduler.engine, fairlane.supervisor\n"
        "print([m for m in ('torch', 'triton', 'transformers', 'numpy', 'pydantic') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (run.stdout.strip(), run.returncode) == ("[]", 0), run.stderr


def test_the_client_commands_load_without_the_servers_extras() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        "import fairlane.cli\n"
        "print([m for m in ('torch', 'yaml', 'tokenizers', 'jinja2', 'grpc', 'google.protobuf') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (run.stdout.strip(), run.returncode) == ("[]", 0), run.stderr
