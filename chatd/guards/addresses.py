"""Which Host and Origin headers are trusted."""

from __future__ import annotations

import re
from collections.abc import Iterable

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
ANYWHERE = frozenset({"", "0.0.0.0", "::"})
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?")


class HostList:
    """Host names that clients may use; anything else could be a name that an attacker points at this machine."""

    def __init__(self, listening: str, allowed: Iterable[str]) -> None:
        names = {name.lower() for name in allowed}
        self._any = "*" in names
        if listening not in ANYWHERE:
            names.add(f"[{listening}]".lower() if ":" in listening else listening.lower())
        self._names = LOOPBACK | names

    @staticmethod
    def valid(host: str) -> bool:
        return _HOST.fullmatch(host) is not None

    def trusts(self, host: str) -> bool:
        """host: a whole Host header; its port is not looked at."""
        match = _HOST.fullmatch(host)
        return match is not None and (self._any or match["name"].lower() in self._names)


class OriginList:
    """Origins whose pages may write: the server's own, as the Host header names it, and those configured."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(origin.lower() for origin in allowed)

    def trusts(self, origin: str, host: str) -> bool:
        origin = origin.lower()
        return origin in self._allowed or origin in (f"http://{host.lower()}", f"https://{host.lower()}")
