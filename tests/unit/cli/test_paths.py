"""Folders that hold sockets and secrets: where they are, and that none is used which somebody else could open."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fairlane.paths import private_dir, runtime_dir


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_without_a_runtime_folder_there_is_one_of_this_user_directly_in_the_temporary_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    found = []
    for value in (None, "", "relative", "/run/user/7"):
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        if value is not None:
            monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        found.append(runtime_dir())
    own = tmp_path / f"fairlane-{os.getuid()}"
    assert found == [own, own, own, Path("/run/user/7/fairlane")]


def test_a_folder_is_created_for_this_user_alone_with_its_parents(tmp_path: Path) -> None:
    path = private_dir(tmp_path / "a" / "b")
    assert (path, mode(path), mode(path.parent), private_dir(path)) == (tmp_path / "a" / "b", 0o700, 0o700, path)


@pytest.mark.parametrize("open_to_others", [0o755, 0o750, 0o701, 0o777, 0o1777])
def test_a_folder_that_is_open_to_others_is_refused_and_left_as_it_is(tmp_path: Path, open_to_others: int) -> None:
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(open_to_others)
    with pytest.raises(PermissionError, match=rf"open to other users \(mode {open_to_others:04o}\).*chmod 700 {path}"):
        private_dir(path)
    assert mode(path) == open_to_others


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    mine = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: mine + 1)
    with pytest.raises(PermissionError, match=f"belongs to user id {mine}, not to you"):
        private_dir(tmp_path / "theirs")


@pytest.mark.parametrize("kind", ["link to a folder", "link to nothing", "file", "fifo"])
def test_what_is_not_a_real_folder_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "link to a folder":
        (tmp_path / "target").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "target")
    elif kind == "link to nothing":
        path.symlink_to(tmp_path / "none")
    elif kind == "file":
        path.touch()
    else:
        os.mkfifo(path)
    with pytest.raises(NotADirectoryError, match="is a link" if "link" in kind else "is not a folder"):
        private_dir(path)
