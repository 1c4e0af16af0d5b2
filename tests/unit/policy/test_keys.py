"""API keys and the files that hold secrets."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.errors import ConfigError
from fairlane.gateway.keys import DemoKeys, _locked, hash_key, is_well_formed, load_or_create_pepper, new_key, read_demo_file
from fairlane.gateway.policy.loader import load_policy_text
from fairlane.gateway.policy.model import Policy

HASH = "hmac-sha256:" + "a" * 64


def policy(*tenants: str, keyed: str = "") -> Policy:
    lines = [f"      {name}: {{tiers: [t]{f', keys: [{{id: k, hash: {HASH!r}}}]' if name == keyed else ''}}}" for name in tenants]
    text = "version: 1\ntiers: {t: {priority: 1}}\norganisations:\n  o:\n    tenants:\n" + "\n".join(lines)
    return load_policy_text(text.encode(), "p")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_key_is_well_formed_and_never_the_same() -> None:
    keys = {new_key() for _ in range(200)}
    assert (len(keys), {is_well_formed(key) for key in keys}, {len(key) for key in keys}) == (200, {True}, {53})


def test_one_wrong_character_anywhere_is_noticed() -> None:
    key = new_key()
    wrong = [key[:i] + ("A" if key[i] != "A" else "B") + key[i + 1 :] for i in range(len(key))]
    assert [text for text in wrong if is_well_formed(text)] == []


@given(st.text(max_size=60))
def test_no_other_text_is_a_key(text: str) -> None:
    assert not is_well_formed(text)


def test_the_hash_is_hmac_sha256() -> None:
    assert hash_key(b"pepper", "fl_x") == "hmac-sha256:" + hmac.new(b"pepper", b"fl_x", hashlib.sha256).hexdigest()


def test_the_pepper_is_made_once_and_only_for_its_owner(tmp_path: Path) -> None:
    state = tmp_path / "a" / "state"
    first = load_or_create_pepper(state)
    assert (len(first), load_or_create_pepper(state) == first, mode(state), mode(state / "pepper")) == (32, True, 0o700, 0o600)


@pytest.mark.parametrize("wrong", [0o640, 0o604, 0o666])
def test_a_pepper_that_others_can_read_is_refused(tmp_path: Path, wrong: int) -> None:
    load_or_create_pepper(tmp_path)
    (tmp_path / "pepper").chmod(wrong)
    with pytest.raises(ConfigError, match=f"can be read by other users .mode {wrong:04o}.: chmod 600"):
        load_or_create_pepper(tmp_path)


@pytest.mark.parametrize("content", ["", "abc", "zz" * 32, "ab" * 31])
def test_a_damaged_pepper_is_refused_and_not_replaced(tmp_path: Path, content: str) -> None:
    load_or_create_pepper(tmp_path)
    (tmp_path / "pepper").write_text(content)
    with pytest.raises(ConfigError, match="is damaged"):
        load_or_create_pepper(tmp_path)
    assert (tmp_path / "pepper").read_text() == content


def test_demo_keys_are_for_the_tenants_that_have_none(tmp_path: Path) -> None:
    demo = DemoKeys.load_or_create(policy("a", "b", keyed="b"), tmp_path / "s")
    principals = demo.principals()
    assert [(p.key_id, p.node, p.loopback_only) for p in principals.values()] == [("demo-o-a", "o/a", True)]
    assert list(principals) == [hash_key(demo.pepper, demo.tenants["o/a"])]


def test_demo_keys_stay_the_same_and_follow_the_policy(tmp_path: Path) -> None:
    first = DemoKeys.load_or_create(policy("a", "b"), tmp_path)
    second = DemoKeys.load_or_create(policy("b", "c"), tmp_path)
    assert (second.admin, second.tenants["o/b"], set(second.tenants)) == (first.admin, first.tenants["o/b"], {"o/b", "o/c"})


def test_another_policy_from_the_same_folder_takes_nobodys_keys(tmp_path: Path) -> None:
    first = DemoKeys.load_or_create(policy("a", "b"), tmp_path)
    second = DemoKeys.load_or_create(policy("c"), tmp_path)
    in_file = read_demo_file(second.path)[1]
    again = DemoKeys.load_or_create(policy("a", "b"), tmp_path)
    assert (list(second.tenants), list(in_file), again) == (["o/c"], ["o/c", "o/a", "o/b"], first)


def test_two_first_starts_at_once_agree_on_the_keys(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, threading\n"
        "from fairlane.gateway.keys import DemoKeys\n"
        "from fairlane.gateway.policy.loader import load_policy_text\n"
        "policy = load_policy_text(sys.argv[2].encode(), 'p')\n"
        "sys.stdin.readline()\n"
        "demo = DemoKeys.load_or_create(policy, pathlib.Path(sys.argv[1]))\n"
        "print(demo.admin, *demo.tenants.values(), demo.admin_key_hash)"
    )
    command = [sys.executable, "-P", "-c", code, str(tmp_path / "state"), policy("a", "b").text]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    starts = [subprocess.Popen(command, env=environment, **pipes) for _ in range(4)]
    for start in starts:  # all are loaded and wait for this
        start.stdin.write("\n")
        start.stdin.flush()
    said = {start.communicate(timeout=60)[0] for start in starts}
    assert len(said) == 1
    assert len(said.pop().split()) == 4


def test_a_first_start_waits_for_one_that_is_writing(tmp_path: Path) -> None:
    first = DemoKeys.load_or_create(policy("a"), tmp_path)
    with _locked(tmp_path):
        late = threading.Thread(target=lambda: DemoKeys.load_or_create(policy("b"), tmp_path))
        late.start()
        late.join(0.1)
        waited = late.is_alive()
        written = {"admin": first.admin, "tenants": {"o/z": new_key()}}
        first.path.write_text(json.dumps(written))
    late.join()
    assert waited
    assert set(read_demo_file(first.path)[1]) == {"o/b", "o/z"}


def test_the_demo_file_is_only_for_its_owner_and_complete(tmp_path: Path) -> None:
    demo = DemoKeys.load_or_create(policy("a"), tmp_path)
    assert (mode(demo.path), read_demo_file(demo.path)) == (0o600, (demo.admin, dict(demo.tenants)))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"admin": "x", "tenants": {}}', '{"admin": 1, "tenants": []}'])
def test_a_damaged_demo_file_is_refused(tmp_path: Path, content: str) -> None:
    path = DemoKeys.load_or_create(policy("a"), tmp_path).path
    path.write_text(content)
    with pytest.raises(ConfigError, match="is damaged: delete it"):
        read_demo_file(path)


def test_no_secret_is_in_a_repr(tmp_path: Path) -> None:
    demo = DemoKeys.load_or_create(policy("a"), tmp_path)
    shown = repr(demo)
    assert [secret for secret in (demo.admin, demo.tenants["o/a"], repr(demo.pepper)) if secret in shown] == []


def test_the_demo_file_is_json_a_person_can_read(tmp_path: Path) -> None:
    demo = DemoKeys.load_or_create(policy("a"), tmp_path)
    assert json.loads(demo.path.read_text()) == {"admin": demo.admin, "tenants": dict(demo.tenants)}
