"""chatd bench: measures parts of chatd on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from cache import PolicyName
from chatd.bench.cache_replay import Replay, replay
from chatd.bench.trace import make_conversations, read_trace
from chatd.commands import bench_scenarios, bench_serve, bench_step, bench_turns
from chatd.commands.arguments import natural, positive
from chatd.commands.options import add_settings, settings_of
from chatd.failure import CommandFailed
from engine.config import KVDtype, WeightsDtype
from engine.errors import ModelError
from engine.openmp import spin_briefly

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from chatd.bench.perplexity import Perplexity

HELP = "measure parts of chatd on this machine"
CACHE_HELP = "replay a load through the prefix cache, without a model"
PERPLEXITY_HELP = "how well the model predicts a text, by types of weights and of keys and values"
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
        "--pages", nargs="+", type=positive, default=PAGES, metavar="N", help="pool sizes (default: 1000 to 50000)"
    )
    cache.add_argument("--requests", type=positive, metavar="N", help="only the first N requests (default: all)")
    cache.add_argument(
        "--page-size", type=positive, default=16, metavar="N", help="tokens, for made-up conversations (default: 16)"
    )
    cache.add_argument("--conversations", type=positive, default=300, metavar="N", help="how many (default: 300)")
    cache.add_argument("--turns", type=positive, default=8, metavar="N", help="at most, each (default: 8)")
    cache.add_argument("--seed", type=natural, default=0, help="of the made-up conversations (default: 0)")
    cache.add_argument("--json", action="store_true", help="print a JSON array instead of a table")
    cache.set_defaults(run=run_cache)
    _add_perplexity(parts)
    for part in (bench_serve, bench_scenarios, bench_turns, bench_step):
        part.add_parser(parts)


def _add_perplexity(parts: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = parts.add_parser(
        "perplexity", help=PERPLEXITY_HELP, description=PERPLEXITY_HELP.capitalize(), allow_abbrev=False
    )
    add_settings(parser, ["model", "models_dir", "threads"])
    weights = [name for name in get_args(WeightsDtype) if name not in ("auto", "fp8")]
    kinds = [name for name in get_args(KVDtype) if name not in ("auto", "fp8")]
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="UTF-8 (default: Python's language reference)")
    add("--dtype", dest="weights", nargs="+", choices=weights, default=["int4"], help="of the weights (default: int4)")
    add("--kv-dtype", dest="kv", nargs="+", choices=kinds, default=["bfloat16"], help="K and V (default: bfloat16)")
    add(
        "--rows",
        nargs="+",
        type=positive,
        default=[256],
        metavar="N",
        help="tokens in a step; few read the packed 4-bit weights, more the dense ones (default: 256)",
    )
    add("--window", type=positive, default=1024, metavar="N", help="tokens of context (default: 1024)")
    add("--tokens", type=positive, default=8192, metavar="N", help="of the text (default: 8192)")
    add("--json", action="store_true", help="print a JSON array instead of a table")
    parser.set_defaults(run=run_perplexity)


def run_cache(arguments: argparse.Namespace) -> int:
    if arguments.trace is not None:
        requests, page_size = read_trace(arguments.trace, arguments.requests), 1
    else:
        made_up = make_conversations(arguments.conversations, arguments.turns, arguments.seed)
        requests, page_size = made_up[: arguments.requests], arguments.page_size
    results = [replay(requests, policy, pages, page_size) for policy in arguments.policy for pages in arguments.pages]
    if arguments.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print(_table(results))
    return 0


def run_perplexity(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments)
    spin_briefly()
    from chatd.bench.perplexity import compare, read_text  # loads torch, which the other commands do without

    text = read_text(arguments.text)
    try:
        results = compare(
            settings.engine_config(),
            text,
            weights=arguments.weights,
            kv=arguments.kv,
            rows=arguments.rows,
            window=arguments.window,
            limit=arguments.tokens,
        )
        if arguments.json:
            print(json.dumps([asdict(result) for result in results], indent=2))
        else:
            _print_perplexities(results)
    except ModelError as error:
        raise CommandFailed(str(error)) from error
    return 0


def _print_perplexities(results: Iterable[Perplexity]) -> None:
    """A line as soon as each is known: they may take minutes."""
    print(
        f"{'weights':<10}{'K and V':<10}{'rows':>6}{'tokens':>9}{'perplexity':>12}{'to the first':>14}{'tokens/s':>10}"
    )
    first = None
    for result in results:
        first = first or result
        change = result.perplexity / first.perplexity - 1
        line = f"{result.weights:<10}{result.kv:<10}{result.rows:>6}{result.scored:>9}{result.perplexity:>12.4f}"
        print(f"{line}{change:>+14.2%}{result.tokens_per_second:>10.0f}", flush=True)


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
