"""gateway.yaml as a schema: what the gateway process listens on, allows and waits for. Tenants and tiers are policy
(policy/), not configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fairlane.config.fields import Bounds, Duration, Size, Text


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Defaults are for one machine. Times in seconds, sizes in bytes (the file writes them with units)."""

    host: Annotated[str, Text(r"\S+", "a host name or address")] = "127.0.0.1"
    port: Annotated[int, Bounds(0, 65535)] = 50051
    admin_host: Annotated[str, Text(r"\S+", "a host name or address")] = "127.0.0.1"
    # 0: any free port, printed at start; None (absent in the file): port + 1.
    admin_port: Annotated[int | None, Bounds(0, 65535)] = None
    # Prometheus metrics over HTTP. As with admin_port, 0 is any free port and None the one after the admin port.
    metrics: bool = True
    metrics_host: Annotated[str, Text(r"\S+", "a host name or address")] = "127.0.0.1"
    metrics_port: Annotated[int | None, Bounds(0, 65535)] = None
    metrics_tenants: Annotated[int, Bounds(0, 1000)] = 20
    reflection: bool = True
    max_message: Annotated[int, Size(1024, 64 << 20)] = 4 << 20
    max_metadata: Annotated[int, Size(1024, 1 << 20)] = 16 << 10
    max_prompt: Annotated[int, Size(1, 64 << 20)] = 1 << 20
    max_concurrent_rpcs: Annotated[int, Bounds(1, 1_000_000)] = 4096
    tokenizer_threads: Annotated[int, Bounds(1, 64)] = 2
    # Token events wait this long for company, so that a busy stream is not one message per token: messages
    # cost the gateway CPU, tokens in a message hardly any.
    coalesce: Annotated[float, Duration(0, 1)] = 0.02
    # Events a stream may hold for a reader that does not read; then it has `slow_consumer` to catch up.
    stream_buffer: Annotated[int, Bounds(16, 1_000_000)] = 4096
    slow_consumer: Annotated[float, Duration(0.1, 3600)] = 30.0
    # For requests without a deadline whose tier sets no max_duration.
    default_max_duration: Annotated[float, Duration(1)] = 600.0
    drain_grace: Annotated[float, Duration(0, 3600)] = 30.0
    # A worker that for this long does not answer pings, or has work and does not advance, is lost.
    worker_timeout: Annotated[float, Duration(0.5, 600)] = 5.0
    # Records a line per request, without content, below the state folder: `fairlane trace export`. trace_size: all its files.
    trace: bool = False
    trace_size: Annotated[int, Size(1 << 20, 1 << 40)] = 64 << 20
    ping_interval: Annotated[float, Duration(0.05, 60)] = 1.0
