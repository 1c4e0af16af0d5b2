"""API keys: how they look, how they are hashed, and the demo keys of a first start. Keys are 256 random bits, so a keyed hash
(4 microseconds) is as safe to store as a slow password hash, which callers could use to exhaust the gateway."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fairlane.errors import ConfigError
from fairlane.gateway.policy.model import Policy, Principal
from fairlane.gateway.private_files import read_private, write_beside, write_private
from fairlane.paths import private_dir

PREFIX = "fl_"
HASH_PREFIX = "hmac-sha256:"
PEPPER_FILE = "pepper"
DEMO_FILE = "demo-keys.json"
_PEPPER_BYTES = 32
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_KEY = re.compile(r"fl_([A-Za-z0-9_-]{43})_([0-9A-Za-z]{6})")


def new_key() -> str:
    """A fresh key: `fl_`, 256 random bits in base64url, `_` and a checksum, by which secret scanners know it for certain."""
    body = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")
    return f"{PREFIX}{body}_{_checksum(body)}"


def is_well_formed(key: str) -> bool:
    """Whether the text could be a key of ours at all: form and checksum. Says nothing about whether it is valid."""
    match = _KEY.fullmatch(key)
    return match is not None and match[2] == _checksum(match[1])


def hash_key(pepper: bytes, key: str) -> str:
    """What the policy file stores of a key: `hmac-sha256:` and 64 hex digits."""
    return HASH_PREFIX + hmac.new(pepper, key.encode(), hashlib.sha256).hexdigest()


def load_or_create_pepper(state_dir: Path) -> bytes:
    """The deployment's pepper, made at the first call. Hashes made with it are worthless without it, so it is backed up with
    the policy but never beside it.

    Raises ConfigError if the file is damaged or readable by others.
    """
    path = private_dir(state_dir) / PEPPER_FILE
    if not path.exists():
        _create(path, secrets.token_hex(_PEPPER_BYTES) + "\n")
    try:
        pepper = bytes.fromhex(_read_private(path))
    except ValueError:
        pepper = b""
    if len(pepper) != _PEPPER_BYTES:
        raise ConfigError([f"{path}: is damaged: 64 hex digits are needed; restore it, or delete it and issue new keys"])
    return pepper


@dataclass(frozen=True, slots=True)
class DemoKeys:
    """Keys that let a first start be tried without any set-up. They work from this machine only.

    tenants: node path to key, for every node of the policy that has no key of its own.
    """

    path: Path
    pepper: bytes = field(repr=False)
    admin: str = field(repr=False)
    tenants: Mapping[str, str] = field(repr=False)

    @classmethod
    def load_or_create(cls, policy: Policy, state_dir: Path) -> DemoKeys:
        """The demo keys in `state_dir`, completed for the policy's nodes and written back if that changed them.

        Keys of nodes that this policy does not have stay in the file, after this policy's: another server may use them.
        Creates state_dir (0700), the pepper and the file (0600). Raises ConfigError if one is damaged or open to others.
        """
        pepper = load_or_create_pepper(state_dir)
        path = state_dir / DEMO_FILE
        with _locked(state_dir):
            admin, old = read_demo_file(path) if path.exists() else (new_key(), {})
            tenants = {node: old.get(node) or new_key() for node in policy.nodes_without_keys()}
            kept = tenants | {node: key for node, key in old.items() if node not in tenants}
            if list(kept.items()) != list(old.items()) or not path.exists():
                write_private(path, json.dumps({"admin": admin, "tenants": kept}, indent=2) + "\n")
        return cls(path, pepper, admin, tenants)

    @property
    def admin_key_hash(self) -> str:
        return hash_key(self.pepper, self.admin)

    def principals(self) -> Mapping[str, Principal]:
        """What Policy.with_principals takes."""
        return {
            hash_key(self.pepper, key): Principal(f"demo-{node.replace('/', '-')}", node, loopback_only=True)
            for node, key in self.tenants.items()
        }


def read_demo_file(path: Path) -> tuple[str, dict[str, str]]:
    """The demo key file's admin key and tenants' keys by node path. Raises ConfigError if it is damaged or open to others."""
    try:
        content = json.loads(_read_private(path))
        keys = [content["admin"], *content["tenants"].values()]
        if all(isinstance(key, str) and is_well_formed(key) for key in keys):
            return content["admin"], dict(content["tenants"])
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ConfigError([f"{path}: is damaged: delete it, and the next `fairlane serve` makes new demo keys"])


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time: who starts second must find the first one's keys, not overwrite them."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _checksum(body: str) -> str:
    number = zlib.crc32(body.encode())
    out = ""
    for _ in range(6):  # 62**6 > 2**32
        number, digit = divmod(number, 62)
        out = _DIGITS[digit] + out
    return out


def _read_private(path: Path) -> str:
    try:
        return read_private(path)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None


def _create(path: Path, text: str) -> None:
    """Writes the file whole, or leaves the one that another process was quicker to create."""
    name = write_beside(path, text.encode(), 0o600)
    try:
        path.hardlink_to(name)
    except FileExistsError:
        pass
    finally:
        name.unlink()
