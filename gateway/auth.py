"""Who is calling: an API key in `authorization` metadata becomes a node of the ownership tree. Every failure has one and
the same answer; the reason is only in our log. What the node may do is decided elsewhere."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from ipaddress import ip_address
from typing import Protocol
from urllib.parse import unquote

from fairlane.errors import FairlaneError
from fairlane.gateway.keys import hash_key, is_well_formed
from fairlane.gateway.policy.model import Policy, Principal

logger = logging.getLogger("fairlane.gateway.auth")

# Far above any key of ours; longer values are not even looked at.
_MAX_HEADER = 512
_TENANT_HEADERS = ("fairlane-tenant", "x-tenant-id", "x-fairlane-tenant")

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Identity:
    """The authenticated caller, fixed for the whole request: its node's facts as they were at admission.

    tiers: what it may ask for, its default first.
    """

    node: str
    key_id: str
    tiers: tuple[str, ...] = ()
    cache_domain: str = ""


class Authenticator(Protocol):
    """Raises UNAUTHENTICATED (one text for all causes) or returns the caller."""

    def authenticate(self, metadata: Metadata, peer: str) -> Identity: ...


def unauthenticated(cause: str) -> FairlaneError:
    """The one answer to every failed authentication; `cause` goes to our log only."""
    logger.info("authentication refused: %s", cause)
    return FairlaneError("UNAUTHENTICATED", "a valid API key is required: authorization: Bearer <key>")


def bearer_key(metadata: Metadata) -> str:
    """The key in `authorization: Bearer <key>`; raises UNAUTHENTICATED unless there is exactly one, of a sane length."""
    values = [value for name, value in metadata if name == "authorization"]
    if len(values) != 1:
        raise unauthenticated(f"{len(values)} authorization values")
    value = values[0]
    if not isinstance(value, str) or len(value) > _MAX_HEADER:
        raise unauthenticated("the authorization value is binary or too long")
    scheme, _, key = value.partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise unauthenticated("not a bearer key")
    return key


def is_loopback(peer: str) -> bool:
    """Whether a gRPC peer string (ipv4:127.0.0.1:5, ipv6:[::1]:5, unix:...) is on this machine."""
    scheme, _, rest = peer.partition(":")
    if scheme == "unix":
        return True
    if scheme not in ("ipv4", "ipv6"):
        return False
    host = unquote(rest).rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _utc_today() -> date:
    return datetime.now(UTC).date()


class PolicyAuthenticator:
    """Authenticates tenants by the policy in force.

    Keys are 256 random bits, so a keyed SHA-256 is as strong as a slow hash and cannot be used to exhaust our CPU.
    """

    def __init__(self, policy: Policy, pepper: bytes, today: Callable[[], date] = _utc_today) -> None:
        self._policy = policy
        self._pepper = pepper
        self._today = today

    def replace(self, policy: Policy) -> None:
        """From now on, callers are looked up in `policy`."""
        self._policy = policy

    def authenticate(self, metadata: Metadata, peer: str) -> Identity:
        entries = tuple(metadata)
        principal = self._principal(bearer_key(entries))
        if principal.not_after is not None and self._today() > principal.not_after:
            raise unauthenticated(f"key {principal.key_id} has expired")
        if principal.loopback_only and not is_loopback(peer):
            raise unauthenticated(f"key {principal.key_id} is for this machine only")
        self._refuse_other_tenants(entries, principal.node)
        node = self._policy.nodes[principal.node]
        return Identity(node.path, principal.key_id, tuple(node.tiers), node.cache_domain)

    def _principal(self, key: str) -> Principal:
        # Malformed keys are hashed too: what a key looks like must not show in the time the refusal takes.
        digest = hash_key(self._pepper, key)
        principal = self._policy.principals.get(digest)
        if principal is None or not is_well_formed(key):
            raise unauthenticated("unknown or malformed key")
        return principal

    @staticmethod
    def _refuse_other_tenants(metadata: Metadata, node: str) -> None:
        """Naming a tenant is never silently ignored; without delegation only the caller's own node may be named."""
        for name, value in metadata:
            if name in _TENANT_HEADERS and value != node:
                raise FairlaneError("TENANT_MISMATCH", f"this key may not act for the tenant named in {name}")


class AdminAuthenticator:
    """Authenticates operators by the one admin key."""

    def __init__(self, admin_key_hash: str, pepper: bytes) -> None:
        self._expected = admin_key_hash
        self._pepper = pepper

    def authenticate(self, metadata: Metadata, peer: str) -> Identity:
        digest = hash_key(self._pepper, bearer_key(metadata))
        if not hmac.compare_digest(digest.encode(), self._expected.encode()):
            raise unauthenticated("not the admin key")
        return Identity(node="admin", key_id="admin")
