"""Recipes of the documentation that need no server, run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipes import Command, File, Shell, missing, parts, section

POLICIES = "docs/policies.md"


def wrong(text: str, folder: Path) -> list[str]:
    """What a section's commands did other than it says."""
    shell, found = Shell(folder), [] if "```console" in text else ["no command"]
    for part in parts(text):
        if isinstance(part, File):
            shell.write(part)
            continue
        done = shell.run(part.line)
        if done.returncode:
            found.append(f"{part.line}: exit code {done.returncode}: {done.stdout}")
        found += [f"{part.line}: does not print {line!r}" for line in missing(part, done.stdout)]
    return found


@pytest.mark.parametrize("title", ["Protect paying customers", "Batch at night", "A free tier that stays small"])
def test_a_recipe_does_what_it_says(title: str, tmp_path: Path) -> None:
    assert wrong(section(POLICIES, title), tmp_path) == []


def test_the_readmes_simulation_prints_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "docs" / "images").mkdir(parents=True)
    found = wrong(section("README.md", "Try it before it goes live"), tmp_path)
    assert (found, (tmp_path / "docs/images/simulate.png").exists()) == ([], True)


def test_a_table_of_times_applies_files_that_the_recipe_has() -> None:
    text = section(POLICIES, "Batch at night")
    applied = re.findall(r"^[\d*/, ]+ fairlane policy apply /etc/fairlane/(\S+)$", text, re.MULTILINE)
    made = {part.name for part in parts(text) if isinstance(part, File)} | set(re.findall(r"> (\S+\.yaml)$", text, re.MULTILINE))
    assert (len(applied), set(applied) - made) == (2, set())


def test_a_line_that_is_not_printed_is_missed() -> None:
    command = Command("x", ("one 5 ms", "…", "two  holds"))
    assert (missing(command, "one 7 ms\nthree\ntwo holds\n"), missing(command, "one 7 ms\ntwo fails\n")) == ([], ["two  holds"])
