"""Bounds on what a visitor of the page may send, and on what a solve may take."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Every bound of the page.

    Args:
        upload: bytes of an uploaded file.
        upload_pixels: pixels of an uploaded image, checked before they are decoded.
        body: bytes of any other request.
        pixels: pixels of an image that is segmented.
        steps: steps of one solve.
        seconds: time that one job may run.
        body_seconds: time within which a request must have arrived.
        at_once: number of jobs that run at the same time; a visitor runs one.
        waiting_each: number of waiting jobs of one visitor.
        waiting: number of waiting jobs of all visitors.
        connections: number of open connections.
        backlog: number of unsent events from which on events come without pictures.
    """

    upload: int = 8 * 10**6
    upload_pixels: int = 16_000_000
    body: int = 2 * 10**6
    pixels: int = 200_000
    steps: int = 300
    seconds: float = 60.0
    body_seconds: float = 20.0
    at_once: int = 2
    waiting_each: int = 8
    waiting: int = 100
    connections: int = 256
    backlog: int = 40


LIMITS = Limits()
