"""Serves a registry at /metrics over HTTP: prometheus_client's application on a small threaded server, so that a scrape never
holds the event loop. What is measured is metrics.py's."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

logger = logging.getLogger("fairlane.gateway.metrics")

PATH = "/metrics"
# A scraper that says nothing for this long is cut off, and no more than this many are answered at once.
_TIMEOUT_S = 10.0
_MAX_SCRAPES = 8
_POLL_S = 0.1

Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class MetricsServer:
    """`start` binds and serves, `stop` ends it. before_scrape runs in the event loop's thread with every scrape."""

    def __init__(self, registry: CollectorRegistry, before_scrape: Callable[[], None] = lambda: None) -> None:
        self._registry = registry
        self._before_scrape = before_scrape
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self, host: str, port: int) -> int:
        """Returns the port it listens on. Raises OSError if it cannot be had. Call it in the event loop."""
        loop = asyncio.get_running_loop()
        application = make_wsgi_app(self._registry)

        def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            if environ["PATH_INFO"] != PATH:
                start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
                return [f"The metrics are at {PATH}\n".encode()]
            loop.call_soon_threadsafe(self._before_scrape)
            body: Iterable[bytes] = application(environ, start_response)
            return body

        self._server = _listen(host, port, answer)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)
        self._thread.start()
        return int(self._server.server_port)

    async def stop(self) -> None:
        """Returns once the port is free; again, or without a start, it does nothing."""
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            await asyncio.to_thread(server.shutdown)
            server.server_close()
            self._thread.join()


class _Server(ThreadingWSGIServer):
    """At most _MAX_SCRAPES threads; more connections are closed unanswered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._free = threading.BoundedSemaphore(_MAX_SCRAPES)

    def server_bind(self) -> None:
        # HTTPServer's own looks the address up in DNS, which can take seconds for a name that only the CGI variables need.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a scrape from %s failed", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


def _listen(host: str, port: int, application: Wsgi) -> _Server:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    kind = _Server6 if family == socket.AF_INET6 else _Server
    return make_server(str(address[0]), port, application, kind, handler_class=_Handler)
