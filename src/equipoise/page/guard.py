"""The door of the page: which requests are answered at all, and the headers of every answer.

Any site that is open in the same browser can send requests to this server. It is kept out by four rules: the `Host` is
a name of this server (or a name of the attacker's could lead here), the `Origin` is the page itself, the cookie holds
the token of the printed address, and the cookie is not sent along from other sites (SameSite).
"""

from __future__ import annotations

import ipaddress
import secrets
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
NO_TOKEN = "This page opens with the complete address that `equipoise page` printed: it contains a token."


def is_loopback(host: str) -> bool:
    return host in LOOPBACK or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Door:
    """What requests are compared with.

    Args:
        host: address that the server listens on.
        port: its port.
        token: secret of the printed address.
    """

    host: str
    port: int
    token: str

    @property
    def cookie(self) -> str:
        return f"equipoise-{self.port}"  # browsers send a cookie to every port of a host

    def knows(self, host: str) -> bool:
        """Return whether a `Host` header names this server.

        A page on another network may also be reached by any address, but not by names that others can define.
        """
        try:
            parts = urlsplit(f"//{host}")
            name, port = parts.hostname or "", parts.port or 80
        except ValueError:
            return False
        if parts.netloc != host or parts.username is not None or port != self.port:
            return False
        return name in (*LOOPBACK, self.host.lower()) or (not is_loopback(self.host) and is_address(name))

    def opens(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self.token.encode())


class Guard:
    """Answer only requests of the page itself; tell the application in ``scope["visitor"]`` who asks."""

    def __init__(self, app: ASGIApp, door: Door):
        self.app, self.door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        connection, cookie = HTTPConnection(scope), ""
        reason, visitor = self.examine(connection)
        if not reason and not visitor:
            visitor = secrets.token_urlsafe(9)
            cookie = f"{self.door.cookie}={self.door.token}.{visitor}; Path=/; HttpOnly; SameSite=Strict"

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if cookie:
                    headers.append("Set-Cookie", cookie)
            await send(message)

        if reason:
            return await PlainTextResponse(f"{reason}\n", 403)(scope, receive, send_with_headers)
        scope["visitor"] = visitor
        return await self.app(scope, receive, send_with_headers)

    def examine(self, connection: HTTPConnection) -> tuple[str, str]:
        """Return why a request is refused, and the visitor if it is one who has been here before."""
        headers: Headers = connection.headers
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self.door.knows(hosts[0]):
            return "The Host of the request is not a name of this server.", ""
        if len(origins) > 1 or any(origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}") for origin in origins):
            return "The Origin of the request is not this page.", ""
        if connection.scope["method"] not in ("GET", "HEAD") and not origins:
            return "The request states no Origin; those of this page do.", ""
        token, _, visitor = connection.cookies.get(self.door.cookie, "").partition(".")
        if self.door.opens(token) and visitor:
            return "", visitor
        if connection.scope["path"] == "/" and self.door.opens(connection.query_params.get("token", "")):
            return "", ""
        return NO_TOKEN, ""
