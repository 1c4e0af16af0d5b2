"""That the documentation names what there is: tests that are quoted as the proof of something, and files that are linked to."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@cache
def known() -> frozenset[str]:
    """Every test function's name, and every test module's."""
    files = list((ROOT / "tests").rglob("test_*.py"))
    functions = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)
    return frozenset(name for path in files for name in (path.stem, *functions.findall(path.read_text())))


def quoted(text: str) -> set[str]:
    """Names of tests; those that stand for several as a pattern (`test_swap_*`, `test_<op>.py`), up to where it begins."""
    return set(re.findall(r"\btest_\w+[*<]?", text))


def is_known(name: str) -> bool:
    beginning = name.rstrip("*<")
    return name in known() or (name != beginning and any(other.startswith(beginning) for other in known()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_quotes_exists(page: Path) -> None:
    assert [name for name in sorted(quoted(page.read_text())) if not is_known(name)] == []


def test_the_bounds_are_quoted_with_their_property_tests() -> None:
    files = (ROOT / "tests" / "properties").glob("test_*.py")
    properties = {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    assert properties - quoted((ROOT / "docs" / "scheduling.md").read_text()) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_links_to_exists(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
