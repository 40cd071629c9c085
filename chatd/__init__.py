"""The server: settings, commands, app factory, routes, errors, metrics."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def chatd_version() -> str:
    """The installed version, or 0 where the package runs from a folder that was never installed."""
    try:
        return version("chatd")
    except PackageNotFoundError:
        return "0"
