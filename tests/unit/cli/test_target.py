"""Which targets are this machine: the demo keys go there and nowhere else."""

from __future__ import annotations

import pytest

from fairlane.cli.target import host_port, is_local

LOCAL = [
    "127.0.0.1:50051",
    "127.0.0.1",
    "127.9.8.7:1",
    "localhost:50051",
    "localhost",
    "LOCALHOST:1",
    "localhost.:1",
    "[::1]:50051",
    "[::1]",
    "::1",
    "[::ffff:127.0.0.1]:1",
    "unix:/run/x",
    "unix:///run/x",
    "unix:x",
    "unix-abstract:x",
    "dns:///localhost:1",
    "dns:127.0.0.1:1",
    "ipv4:127.0.0.1:1",
    "ipv4:127.0.0.1:1,127.0.0.2:2",
    "ipv6:[::1]:1",
]
ELSEWHERE = [
    "127.evil.com:1",
    "127.0.0.1.evil.com:1",
    "localhost.example:1",
    "localhost.evil",
    "localhostx:1",
    "xlocalhost:1",
    "10.0.0.1:1",
    "[::2]:1",
    "::2",
    "[::ffff:10.0.0.1]:1",
    "dns:///127.evil.com:1",
    "dns://evil.example/localhost:1",
    "dns://8.8.8.8/127.0.0.1:1",
    "dns:evil:1",
    "ipv4:127.0.0.1:1,10.0.0.1:1",
    "ipv4:10.0.0.1:1",
    "ipv4:localhost:1",
    "ipv6:[::2]:1",
    "unixx:/run/x",
    "xds:///localhost",
    "http://localhost:1",
    "127.1:1",
    "0.0.0.0:1",
    "evil:127.0.0.1",
    "/localhost",
]


@pytest.mark.parametrize("target", LOCAL)
def test_this_machine(target: str) -> None:
    assert is_local(target)


@pytest.mark.parametrize("target", [*ELSEWHERE, ""])
def test_other_machines(target: str) -> None:
    assert not is_local(target)


def test_ipv6_addresses_are_bracketed_once() -> None:
    assert [host_port(host, 1) for host in ("127.0.0.1", "::1", "[::1]", "a.b")] == ["127.0.0.1:1", "[::1]:1", "[::1]:1", "a.b:1"]
