"""Where a command connects to. Decides whether a gRPC target can only be this machine, which is what demo keys are for and what
no proxy may come between; whether anybody listens there is for others to find out."""

from __future__ import annotations

from ipaddress import ip_address

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1", "*": "127.0.0.1"}  # noqa: S104 - recognized, not bound


def host_port(host: str, port: int) -> str:
    """As gRPC takes it; an IPv6 address is put into brackets."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{host}:{port}"


def is_local(target: str) -> bool:
    """Whether a gRPC target means this machine, whatever the resolver says: a unix socket or loopback addresses only.

    Judged by the host that gRPC would connect to, not by how the text begins: 127.evil.example is somebody's name.
    """
    scheme, colon, rest = target.partition(":")
    if colon and scheme in ("unix", "unix-abstract"):
        return True
    if colon and scheme in ("ipv4", "ipv6"):
        return all(_is_loopback(_host(address), names=False) for address in rest.split(","))
    if colon and scheme == "dns":
        if not rest.startswith("//"):
            return _is_loopback(_host(rest), names=True)
        server, _, name = rest[2:].partition("/")
        return not server and _is_loopback(_host(name), names=True)  # with a server named, localhost is what that says
    return "/" not in target and _is_loopback(_host(target), names=True)


def _host(address: str) -> str:
    """The host of HOST, HOST:PORT, [V6]:PORT, [V6] or V6."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address if address.count(":") > 1 else address.partition(":")[0]


def _is_loopback(host: str, *, names: bool) -> bool:
    if names and host.lower().removesuffix(".") == "localhost":
        return True
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
