"""Three loads of fixed lengths, and where their time goes: waiting, prefill, decode."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

from prometheus_client.parser import text_string_to_metric_families

from chatd.bench.client import ChatClient
from chatd.bench.load import Load
from chatd.bench.words import Prompts


@dataclass(frozen=True, slots=True)
class Scenario:
    """Lengths in tokens."""

    name: str
    prompt_tokens: int
    output_tokens: int

    def scaled(self, scale: float) -> Scenario:
        """At least one token each."""
        return Scenario(self.name, max(1, round(self.prompt_tokens * scale)), max(1, round(self.output_tokens * scale)))


SCENARIOS = (
    Scenario("short answers", 128, 128),
    Scenario("summaries", 2048, 512),
    Scenario("code", 512, 1024),
)


@dataclass(frozen=True, slots=True)
class Stages:
    """What chatd's own numbers say that requests took, summed, in seconds."""

    queue_s: float
    prefill_s: float
    decode_s: float

    def __sub__(self, earlier: Stages) -> Stages:
        return Stages(
            self.queue_s - earlier.queue_s, self.prefill_s - earlier.prefill_s, self.decode_s - earlier.decode_s
        )


@dataclass(slots=True)
class Played:
    """A scenario, as far as it came. stages: None from a server that does not tell them, and before the end."""

    scenario: Scenario
    load: Load
    stages: Stages | None = None


@dataclass(frozen=True, slots=True)
class Player:
    """Sends `requests` requests of a scenario, `concurrency` at a time. Their prompts follow from the seed."""

    concurrency: int
    requests: int
    seed: int

    async def play(self, scenario: Scenario, client: ChatClient, prompts: Prompts, played: list[Played]) -> None:
        """Appends to `played` at the start, so that it is there when this is cancelled. Raises CommandFailed for a
        prompt shorter than the chat template."""
        random = Random(f"{self.seed} {scenario.name}")
        asked = [prompts.of_length(scenario.prompt_tokens, random) for _ in range(self.requests)]
        before = stages_of(await client.metrics())
        with Load(client, scenario.name, concurrency=self.concurrency, expected=self.requests) as load:
            result = Played(scenario, load)
            played.append(result)
            await asyncio.gather(
                *(
                    load.ask(messages, scenario.output_tokens, load=scenario.name, request=number)
                    for number, messages in enumerate(asked)
                )
            )
        after = stages_of(await client.metrics())
        if before is not None and after is not None:
            result.stages = after - before


def stages_of(metrics: str | None) -> Stages | None:
    """From the text of /metrics; None where chatd's histograms are not in it."""
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(metrics or ""):
            sums |= {sample.name: sample.value for sample in family.samples if sample.name.endswith("_seconds_sum")}
        return Stages(*(sums[f"chatd_{stage}_seconds_sum"] for stage in ("queue", "prefill", "decode")))
    except (ValueError, LookupError):
        return None
