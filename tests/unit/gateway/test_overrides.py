"""Overrides: in force at once, for a node and all below it, until they expire or are lifted; kept on disk, each an audit line."""

from __future__ import annotations

import json
import logging
import stat
from pathlib import Path

import pytest

from fairlane.errors import ConfigError
from fairlane.gateway.overrides import FILE, Kind, Overrides


class Wall:
    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def wall() -> Wall:
    return Wall()


def test_a_suspension_covers_the_node_and_all_below_it_and_nothing_else(wall: Wall) -> None:
    overrides = Overrides(wall=wall)
    overrides.put(Kind.SUSPEND_NODE, "saas/paid", by="op")
    paths = ("saas", "saas/paid", "saas/paid/alice", "saas/paid2", "saas/paid2/alice")
    assert [overrides.suspended(path) is not None for path in paths] == [False, True, True, False, False]


def test_an_override_expires_by_itself(wall: Wall) -> None:
    overrides = Overrides(wall=wall)
    overrides.put(Kind.PAUSE_TIER, "batch", by="op", for_s=60)
    wall.now_s += 59.9
    before = overrides.paused("batch")
    wall.now_s += 0.1
    assert before is not None
    assert (overrides.paused("batch"), overrides.active()) == (None, ())


def test_a_later_one_replaces_an_earlier_one_of_the_same_target(wall: Wall) -> None:
    overrides = Overrides(wall=wall)
    overrides.put(Kind.PAUSE_TIER, "batch", by="op", for_s=60)
    overrides.put(Kind.PAUSE_TIER, "batch", by="op")
    wall.now_s += 1e6
    assert overrides.paused("batch") is not None


def test_lifting_says_whether_there_was_one(wall: Wall) -> None:
    overrides = Overrides(wall=wall)
    overrides.put(Kind.SUSPEND_NODE, "acme", by="op")
    assert [overrides.lift(Kind.SUSPEND_NODE, "acme", by="op") for _ in range(2)] == [True, False]
    assert overrides.suspended("acme") is None


def test_they_survive_a_restart_with_their_ends(tmp_path: Path, wall: Wall) -> None:
    first = Overrides(tmp_path, wall)
    first.put(Kind.SUSPEND_NODE, "acme/shop", by="op", for_s=100)
    first.put(Kind.REVOKE_KEY, "hmac-sha256:ab", by="op", label="k1")
    saved, before = first.save(), first.active()
    wall.now_s += 50
    second = Overrides(tmp_path, wall)
    kept = second.active()
    wall.now_s += 50
    assert (saved, kept) == (True, before)
    assert [entry.label for entry in second.active()] == ["k1"]
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"overrides": [{"kind": "suspend_node"}]}', '{"overrides": [{"kind": "x"}]}'])
def test_a_damaged_file_stops_the_start_instead_of_lifting_everything(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    (tmp_path / FILE).chmod(0o600)
    with pytest.raises(ConfigError, match="is damaged"):
        Overrides(tmp_path)


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"overrides": []}')
    (tmp_path / FILE).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Overrides(tmp_path)


def test_a_full_disk_leaves_it_in_force_and_says_so(tmp_path: Path, wall: Wall, caplog: pytest.LogCaptureFixture) -> None:
    overrides = Overrides(tmp_path / "gone", wall)
    overrides.put(Kind.PAUSE_TIER, "batch", by="op")
    assert (overrides.save(), overrides.paused("batch") is not None) == (False, True)
    assert "will not survive a restart" in caplog.text


def test_each_decision_is_one_audit_line_with_who_what_and_until(wall: Wall, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fairlane.audit")
    overrides = Overrides(wall=wall)
    overrides.put(Kind.SUSPEND_NODE, "acme/shop", by="eve from ipv4:127.0.0.1:1", for_s=60)
    overrides.lift(Kind.SUSPEND_NODE, "acme/shop", by="bob")
    overrides.put(Kind.PAUSE_TIER, "batch", by="bob", for_s=1)
    wall.now_s += 1
    overrides.active()
    lines = [json.loads(record.message) for record in caplog.records]
    assert lines[0] == {
        "action": "suspend_node",
        "target": "acme/shop",
        "by": "eve from ipv4:127.0.0.1:1",
        "until": "2023-11-14T22:14:20+00:00",
    }
    assert [line["action"] for line in lines] == ["suspend_node", "lift_suspend_node", "pause_tier", "expired_pause_tier"]
