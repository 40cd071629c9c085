"""Types of arguments. Each raises what argparse tells in one line, with exit status 2."""

from __future__ import annotations

from argparse import ArgumentTypeError
from math import isfinite
from pathlib import Path
from urllib.parse import urlsplit


def natural(text: str) -> int:
    return _at_least(0, text)


def positive(text: str) -> int:
    return _at_least(1, text)


def seconds(text: str) -> float:
    number = _finite(text)
    if number < 0:
        raise ArgumentTypeError(f"{text} is less than 0")
    return number


def factor(text: str) -> float:
    number = _finite(text)
    if number <= 0:
        raise ArgumentTypeError(f"{text} is not above 0")
    return number


def server_url(text: str) -> str:
    """An http or https address, without /v1 and the slash at its end. It is shown in reports, so it has no password."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or "@" in parts.netloc:
        raise ArgumentTypeError(f"{text} is no address of a server, such as http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def api_key(text: str) -> str:
    """What may stand in a header. The key itself is never told."""
    if not (text.isascii() and text.isprintable() and text.strip()):
        raise ArgumentTypeError("a key has printable ASCII characters only")
    return text


def new_file(text: str) -> Path:
    """A file that can be written, which is better found out before the work than after it."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentTypeError(f"{text} cannot be written: " + ("a folder" if path.is_dir() else "no such folder"))
    return path


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text} is no whole number") from None
    if number < least:
        raise ArgumentTypeError(f"{number} is less than {least}")
    return number


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text} is no number") from None
    if not isfinite(number):
        raise ArgumentTypeError(f"{text} is no number")
    return number
