"""The policy history on disk: newest first, bounded, private, and a restart with the same file does not push real changes out."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from fairlane.gateway.history import FOLDER, PolicyHistory


def record(history: PolicyHistory, *generations: int) -> None:
    for generation in generations:
        history.record(generation, f"{generation:064x}", f"text {generation}", "file")


def test_the_newest_come_first_and_only_so_many_are_kept(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path, keep=3, wall=lambda: 5.0)
    record(history, 1, 2, 3, 4, 9)
    entries = history.entries()
    assert [entry.generation for entry in entries] == [9, 4, 3]
    assert (entries[0].text, entries[0].applied_s, entries[0].origin) == ("text 9", 5.0, "file")
    assert (history.last_generation(), history.get(1), len(list((tmp_path / FOLDER).iterdir()))) == (9, None, 3)


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path)
    record(history, 1)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in ((tmp_path / FOLDER), *(tmp_path / FOLDER).iterdir())]
    assert modes == [0o700, 0o600]


def test_a_restart_with_the_same_file_moves_the_newest_entry_on(tmp_path: Path) -> None:
    PolicyHistory(tmp_path).record(7, "a" * 64, "x", "file")
    again = PolicyHistory(tmp_path)
    again.record(again.last_generation() + 1, "a" * 64, "x", "start")
    assert [(entry.generation, entry.origin) for entry in again.entries()] == [(8, "start")]


def test_a_damaged_entry_is_skipped_but_its_generation_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history = PolicyHistory(tmp_path)
    record(history, 1, 2)
    (tmp_path / FOLDER / "00000002.json").write_text("{")
    assert [entry.generation for entry in history.entries()] == [1]
    assert (history.get(2), history.last_generation()) == (None, 2)
    assert "cannot be used" in caplog.text


def test_a_disk_that_cannot_be_written_is_logged_and_not_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder should be")
    record(PolicyHistory(tmp_path), 1)
    assert "not in the history" in caplog.text


def test_without_a_state_folder_nothing_is_kept() -> None:
    history = PolicyHistory(None)
    record(history, 1)
    assert (history.entries(), history.last_generation()) == ([], 0)
