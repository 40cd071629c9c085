"""What is made of measured times. Every figure of the load benchmarks is computed here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from chatd.bench.client import Answer


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` (0 to 1) of the sorted values lie, linear between the two nearest: the position
    is share * (n - 1) (definition 7 of Hyndman and Fan, 1996). None without values."""
    return float(np.percentile(values, share * 100)) if len(values) else None


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of times in milliseconds, over `count` of them; None without any."""

    count: int
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread:
        values = [1000 * value for value in seconds]
        return cls(len(values), percentile(values, 0.5), percentile(values, 0.95), percentile(values, 0.99))


@dataclass(frozen=True, slots=True)
class Group:
    """Answers of one kind, such as those of one turn. Means in tokens, None where the server does not tell."""

    requests: int
    mean_prompt_tokens: float | None
    mean_cached_tokens: float | None
    ttft: Spread
    tpot: Spread

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Group:
        return cls(
            len(answers),
            _mean(answer.prompt_tokens for answer in answers),
            _mean(answer.cached_tokens for answer in answers),
            Spread.of(answer.ttft_s for answer in answers),
            Spread.of(answer.tpot_s for answer in answers if answer.tpot_s is not None),
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """Of all answers of one load. Rates are per second of wall_s, from the first request to the last end.

    ttft, tpot, itl, e2e: see Answer. first_token_share: the part of all time that answers took which had passed when
    their first token came (waiting and prefill); the rest is decode. hit_rate: cached tokens of prompt tokens, None
    where the server does not tell.
    """

    requests: int
    wall_s: float
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    requests_per_s: float | None
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None
    hit_rate: float | None
    first_token_share: float | None
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread

    @classmethod
    def of(cls, answers: Sequence[Answer], wall_s: float) -> Summary:
        prompt = sum(answer.prompt_tokens or 0 for answer in answers)
        output = sum(answer.output_tokens for answer in answers)
        told = [answer for answer in answers if answer.cached_tokens is not None and answer.prompt_tokens]
        cached = sum(answer.cached_tokens or 0 for answer in told)
        total_s = sum(answer.e2e_s for answer in answers)
        return cls(
            requests=len(answers),
            wall_s=wall_s,
            prompt_tokens=prompt,
            cached_tokens=cached if told else None,
            output_tokens=output,
            requests_per_s=ratio(len(answers), wall_s),
            output_tokens_per_s=ratio(output, wall_s),
            total_tokens_per_s=ratio(prompt + output, wall_s),
            hit_rate=ratio(cached, sum(answer.prompt_tokens or 0 for answer in told)),
            first_token_share=ratio(sum(answer.ttft_s for answer in answers), total_s),
            ttft=Spread.of(answer.ttft_s for answer in answers),
            tpot=Spread.of(answer.tpot_s for answer in answers if answer.tpot_s is not None),
            itl=Spread.of(gap for answer in answers for gap in answer.itl_s),
            e2e=Spread.of(answer.e2e_s for answer in answers),
        )


def ratio(part: float | None, whole: float | None) -> float | None:
    """None where one of them is unknown, or nothing is divided by."""
    return part / whole if part is not None and whole else None


def _mean(values: Iterable[int | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
