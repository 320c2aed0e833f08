"""Serves the live view over HTTP, read-only: a page, `/status.json` and Prometheus' `/metrics`."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import ipaddress
import json
import re
import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from laconic.log import logger
from laconic.tracking.prometheus import render

LOOPBACK = "127.0.0.1"
REQUEST_SECONDS = 5.0  # in which a client must have sent its request
POLL_SECONDS = 0.05  # between two looks for the end


def parse_address(dashboard: object) -> tuple[str, int]:
    """Returns host and port of the argument `dashboard` of a Worker.

    Raises:
        ValueError: it is neither a port nor HOST:PORT.

    >>> parse_address(8080), parse_address("0.0.0.0:8080"), parse_address("[::1]:80")
    (('127.0.0.1', 8080), ('0.0.0.0', 8080), ('::1', 80))
    """
    host, port = LOOPBACK, -1
    if isinstance(dashboard, int) and not isinstance(dashboard, bool):
        port = dashboard
    elif isinstance(dashboard, str) and (match := re.fullmatch(r"(?:\[(.+)\]|([^:]+)):(\d{1,5})", dashboard)):
        host, port = match[1] or match[2], int(match[3])
    if not 0 <= port < 2**16:
        raise ValueError(
            f"dashboard must be a port from 0 (any free one) to 65535, or a text HOST:PORT such as '0.0.0.0:8080', "
            f"not {dashboard!r}"
        )
    return host, port


class Server(ThreadingHTTPServer):
    """Listens at an address from its construction on, and answers once `start` was called.

    Args:
        address: host and port; port 0 for a free one.
        status: returns what is served. Any thread calls it.

    Raises:
        OSError: it cannot listen there.
    """

    daemon_threads = True
    allow_reuse_port = False  # a port that another job uses must be an error

    def __init__(self, address: tuple[str, int], status: Callable[[], dict[str, Any]]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.status = status
        self.page = Path(__file__).with_name("page.html").read_bytes()
        self.policy = _policy(self.page.decode())
        self._thread = threading.Thread(
            target=self.serve_forever, args=(POLL_SECONDS,), name="laconic-dashboard-http", daemon=True
        )
        super().__init__(address, _Handler)
        self.is_local = ipaddress.ip_address(self.server_name).is_loopback

    def server_bind(self) -> None:
        # HTTPServer would look up the host's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @property
    def url(self) -> str:
        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{host}:{self.server_port}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and frees the port."""
        if self._thread.ident is not None:
            self.shutdown()
            self._thread.join()
        with contextlib.suppress(OSError):
            # Forked children, such as those of a DataLoader, have the socket too: it must not keep the port.
            self.socket.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request to the dashboard failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = REQUEST_SECONDS
    server_version = "laconic"
    sys_version = ""

    def do_GET(self) -> None:
        if self.server.is_local and not _is_loopback(self.headers.get("Host", "")):
            # Otherwise a web page that the user visits could read the view, through a host name that it controls.
            self._answer(403, "text/plain", b"this address serves only loopback host names, such as localhost\n")
            return
        path = self.path.partition("?")[0]
        if path == "/":
            self._answer(200, "text/html", self.server.page)
        elif path == "/status.json":
            self._answer(200, "application/json", json.dumps(self.server.status()).encode())
        elif path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4", render(self.server.status()).encode())
        else:
            self._answer(404, "text/plain", b"there are /, /status.json and /metrics\n")

    do_HEAD = do_GET

    def _answer(self, code: int, kind: str, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", self.server.policy)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


def _is_loopback(host: str) -> bool:
    """Returns whether the value of a Host header names this machine itself."""
    name = re.sub(r":\d*$", "", host).strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _policy(page: str) -> str:
    """Returns a content security policy that admits the page's own script and style, and nothing else."""

    def digest(tag: str) -> str:
        content = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; connect-src 'self'; "
        f"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
