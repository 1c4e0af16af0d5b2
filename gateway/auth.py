"""Who is calling, and for whom: an API key in `authorization` metadata becomes a node of the ownership tree, or with delegation
one below it. Every failed authentication has one and the same answer; the reason is only in our log. What the node may do is
decided elsewhere."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from ipaddress import ip_address
from typing import Protocol
from urllib.parse import unquote

from fairlane.errors import FairlaneError, FieldViolation, InvalidRequest
from fairlane.gateway import tree
from fairlane.gateway.keys import hash_key, is_well_formed
from fairlane.gateway.overrides import Overrides
from fairlane.gateway.policy.model import Policy, Principal

# Far above any key of ours; longer values are not even looked at.
_MAX_HEADER = 512
# Naming a tenant with these is delegation; the others, which proxies and clients of other systems send, only ever refuse.
_DELEGATION_HEADERS = ("fairlane-tenant", "x-fairlane-tenant")
_TENANT_HEADERS = (*_DELEGATION_HEADERS, "x-tenant-id")

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Identity:
    """The authenticated caller, fixed for the whole request.

    node: whom it acts for: its key's own node, or with delegation one below it. tiers: what it may ask for, its default first.
    policy, generation: what it was authenticated by; the whole request is judged by that one. None and 0 for operators.
    """

    node: str
    key_id: str
    tiers: tuple[str, ...] = ()
    key_hash: str = field(default="", repr=False)
    policy: Policy | None = field(default=None, repr=False)
    generation: int = 0


class Authenticator(Protocol):
    """Raises UNAUTHENTICATED (one text for all causes) or returns the caller."""

    def authenticate(self, metadata: Metadata, peer: str) -> Identity: ...


class Unauthenticated(FairlaneError):
    """The one answer to every failed authentication; `cause` is for our log only."""

    def __init__(self, cause: str) -> None:
        super().__init__("UNAUTHENTICATED", "a valid API key is required: authorization: Bearer <key>")
        self.cause = cause


def bearer_key(metadata: Metadata) -> str:
    """The key in `authorization: Bearer <key>`; raises UNAUTHENTICATED unless there is exactly one, of a sane length."""
    values = [value for name, value in metadata if name == "authorization"]
    if len(values) != 1:
        raise Unauthenticated(f"{len(values)} authorization values")
    value = values[0]
    if not isinstance(value, str) or len(value) > _MAX_HEADER:
        raise Unauthenticated("the authorization value is binary or too long")
    scheme, _, key = value.partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise Unauthenticated("not a bearer key")
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

    def __init__(
        self, policy: Policy, generation: int, pepper: bytes, overrides: Overrides, today: Callable[[], date] = _utc_today
    ) -> None:
        self._policy = policy
        self._generation = generation
        self._pepper = pepper
        self._overrides = overrides
        self._today = today

    def replace(self, policy: Policy, generation: int) -> None:
        """From now on, callers are looked up in `policy`: a key it does not have is dead."""
        self._policy, self._generation = policy, generation

    def authenticate(self, metadata: Metadata, peer: str) -> Identity:
        """Raises UNAUTHENTICATED, TENANT_MISMATCH for a tenant the key may not act for, INVALID_REQUEST for a malformed one."""
        entries = tuple(metadata)
        digest, principal = self._principal(bearer_key(entries))
        if principal.not_after is not None and self._today() > principal.not_after:
            raise Unauthenticated(f"key {principal.key_id} has expired")
        if principal.loopback_only and not is_loopback(peer):
            raise Unauthenticated(f"key {principal.key_id} is for this machine only")
        if self._overrides.revoked(digest) is not None:
            raise Unauthenticated(f"key {principal.key_id} is revoked")
        node = _acting_for(entries, principal, self._policy)
        tiers = self._policy.nodes[owner(node)].tiers
        return Identity(node, principal.key_id, tiers, digest, self._policy, self._generation)

    def _principal(self, key: str) -> tuple[str, Principal]:
        # Malformed keys are hashed too: what a key looks like must not show in the time the refusal takes.
        digest = hash_key(self._pepper, key)
        principal = self._policy.principals.get(digest)
        if principal is None or not is_well_formed(key):
            raise Unauthenticated("unknown or malformed key")
        return digest, principal


def _acting_for(metadata: Metadata, principal: Principal, policy: Policy) -> str:
    """The node a request is for. Naming a tenant is never silently ignored: without delegation it is refused."""
    named = {(name, value) for name, value in metadata if name in _TENANT_HEADERS}
    if not named:
        return principal.node
    values = {value for _, value in named}
    path = values.pop()
    allowed = principal.may_act_for_children and not values and all(name in _DELEGATION_HEADERS for name, _ in named)
    if not allowed or not isinstance(path, str):
        raise _mismatch(named)
    if not tree.is_well_formed(path):
        text = "must be organisation/tenant/member, each of 1 to 128 letters, digits and . _ @ : + = -"
        raise InvalidRequest([FieldViolation(_DELEGATION_HEADERS[0], text)])
    if not tree.is_below(path, principal.node) or not _exists(path, policy):
        raise _mismatch(named)
    return path


def _exists(path: str, policy: Policy) -> bool:
    """Whether the policy has the node, or a template for such members. One answer for all that is not there."""
    node = policy.nodes.get(owner(path))
    return node is not None and (node.path == path or node.members is not None)


def owner(path: str) -> str:
    """The organisation or tenant whose entry in the policy speaks for the node: a member's is its tenant's."""
    return "/".join(path.split("/")[:2])


def _mismatch(named: Iterable[tuple[str, str | bytes]]) -> FairlaneError:
    names = ", ".join(sorted({name for name, _ in named}))
    return FairlaneError("TENANT_MISMATCH", f"this key may not act for the tenant named in {names}")


class AdminAuthenticator:
    """Authenticates operators by the one admin key, which is a demo key: it works from this machine only."""

    def __init__(self, admin_key_hash: str, pepper: bytes) -> None:
        self._expected = admin_key_hash
        self._pepper = pepper

    def authenticate(self, metadata: Metadata, peer: str) -> Identity:
        digest = hash_key(self._pepper, bearer_key(metadata))
        if not hmac.compare_digest(digest.encode(), self._expected.encode()):
            raise Unauthenticated("not the admin key")
        if not is_loopback(peer):
            raise Unauthenticated("the admin key is for this machine only")
        return Identity(node="admin", key_id="admin")
