"""Which hosts and origins are trusted."""

from __future__ import annotations

import pytest

from chatd.guards.addresses import HostList, OriginList


@pytest.mark.parametrize(
    ("host", "listening", "allowed", "trusted"),
    [
        ("localhost", "127.0.0.1", (), True),
        ("LOCALHOST:8000", "127.0.0.1", (), True),
        ("127.0.0.1:1", "0.0.0.0", (), True),
        ("[::1]:8000", "127.0.0.1", (), True),
        ("[fe80::1]:8000", "fe80::1", (), True),
        ("192.168.1.5:8000", "192.168.1.5", (), True),
        ("192.168.1.5:8000", "0.0.0.0", (), False),
        ("evil.example", "127.0.0.1", (), False),
        ("localhost.evil.example", "127.0.0.1", (), False),
        ("chat.example.org", "127.0.0.1", ("Chat.Example.org",), True),
        ("anything.example", "127.0.0.1", ("*",), True),
        ("", "127.0.0.1", ("*",), False),
        ("a b", "127.0.0.1", ("*",), False),
    ],
)
def test_hosts(host: str, listening: str, allowed: tuple[str, ...], trusted: bool) -> None:
    assert HostList(listening, allowed).trusts(host) is trusted


@pytest.mark.parametrize(
    ("origin", "trusted"),
    [
        ("http://localhost:8000", True),
        ("https://localhost:8000", True),
        ("HTTP://LOCALHOST:8000", True),
        ("https://chat.example.org", True),
        ("http://localhost:8001", False),
        ("http://localhost", False),
        ("http://localhost:8000.evil.example", False),
        ("https://evil.example", False),
        ("null", False),
        ("", False),
    ],
)
def test_origins(origin: str, trusted: bool) -> None:
    assert OriginList(["https://chat.example.org"]).trusts(origin, "localhost:8000") is trusted
