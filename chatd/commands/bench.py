"""chatd bench: measures parts of chatd on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from cache import PolicyName
from chatd.bench.cache_replay import Replay, replay
from chatd.bench.trace import Request, make_conversations, read_trace

if TYPE_CHECKING:
    from argparse import _SubParsersAction

HELP = "measure parts of chatd on this machine"
CACHE_HELP = "replay a load through the prefix cache, without a model"
PAGES = [1000, 5000, 10_000, 50_000]


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help=HELP, description=HELP, allow_abbrev=False)
    parts = parser.add_subparsers(dest="part", metavar="part", required=True)
    cache = parts.add_parser("cache", help=CACHE_HELP, description=CACHE_HELP, allow_abbrev=False)
    cache.add_argument(
        "trace",
        nargs="?",
        type=Path,
        help="JSON lines with hash_ids, as in Mooncake's traces; each id is one page (default: made-up conversations)",
    )
    cache.add_argument(
        "--policy", nargs="+", choices=get_args(PolicyName), default=["lru"], help="eviction policies (default: lru)"
    )
    cache.add_argument(
        "--pages", nargs="+", type=_positive, default=PAGES, metavar="N", help="pool sizes (default: 1000 to 50000)"
    )
    cache.add_argument("--requests", type=_positive, metavar="N", help="only the first N requests (default: all)")
    cache.add_argument(
        "--page-size", type=_positive, default=16, metavar="N", help="tokens, for made-up conversations (default: 16)"
    )
    cache.add_argument("--conversations", type=_positive, default=300, metavar="N", help="how many (default: 300)")
    cache.add_argument("--turns", type=_positive, default=8, metavar="N", help="at most, each (default: 8)")
    cache.add_argument("--seed", type=int, default=0, help="of the made-up conversations (default: 0)")
    cache.add_argument("--json", action="store_true", help="print a JSON array instead of a table")
    cache.set_defaults(run=run_cache)


def run_cache(arguments: argparse.Namespace) -> int:
    if arguments.trace is not None:
        requests, page_size = read_trace(arguments.trace, arguments.requests), 1
    else:
        made_up = make_conversations(arguments.conversations, arguments.turns, arguments.seed)
        requests, page_size = made_up[: arguments.requests], arguments.page_size
    results = [
        replay(requests, policy, pages, page_size, _progress(f"{policy}, {pages} pages", requests))
        for policy in arguments.policy
        for pages in arguments.pages
    ]
    if arguments.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print(_table(results))
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _progress(what: str, requests: Sequence[Request]) -> Callable[[int], None]:
    """Redraws one line for people; silent where nobody watches."""

    def draw(done: int) -> None:
        if done % 500 == 0 or done == len(requests):
            end = "\r\033[K" if done == len(requests) else ""
            print(f"\r{what}: {done} of {len(requests)}{end}", end="", file=sys.stderr, flush=True)

    return draw if sys.stderr.isatty() else lambda done: None


def _table(results: Sequence[Replay]) -> str:
    head = f"{'policy':<9}{'pages':>8}{'hits':>8}{'unshared':>10}{'evicted':>9}{'refused':>9}"
    head += f"{'acquire µs':>12}{'commit µs':>11}{'evict µs/page':>15}{'bytes/token':>13}"
    lines = [head]
    for result in results:
        line = f"{result.policy:<9}{result.pages:>8}{_number(result.hit_rate, 4):>8}"
        line += f"{_number(result.hit_rate_beyond_shared, 4):>10}{result.evicted_pages:>9}{result.refused:>9}"
        line += f"{result.acquire_us:>12.1f}{result.commit_us:>11.1f}"
        line += f"{_number(result.evict_us_per_page, 2):>15}{_number(result.bytes_per_token, 1):>13}"
        lines.append(line)
    first = results[0]
    lines.append("")
    lines.append(f"{first.requests} requests, {first.page_size} tokens a page; hits: share of looked-up tokens found,")
    lines.append("unshared: the same beyond what all prompts begin with.")
    return "\n".join(lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
