"""Tokens chosen on the device beside those that the host draws from the same logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.api import SamplingParams
from engine.sampling.draw import Draw, draw
from engine.sampling.most_likely import MostLikely
from engine.sampling.on_device import Chosen, DeviceChooser, DrawTables, Verdict
from tests.gpu.device import Device

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.5, top_k=1000),
    SamplingParams(top_k=40, top_p=0.9, min_p=0.01),
    SamplingParams(top_p=0.9, temperature=0.7),
    SamplingParams(min_p=0.05),
)
CUT_BY_RANK = KINDS[:4]
VOCABULARY = 128_256


def check_choices(device: Device, most_likely: MostLikely, vocabulary: int | None = None, rows: int = 48) -> None:
    """Random logits, logits of which many are equal, and a row that is no number: AssertionError where one differs."""
    vocabulary = vocabulary or VOCABULARY
    random = torch.Generator().manual_seed(0)
    smooth = torch.randn(rows, vocabulary, generator=random) * 4
    stepped = torch.randint(0, 3, (rows, vocabulary), generator=random).float()
    _compare(device, most_likely, "random", smooth, _draws(KINDS, rows))
    _compare(device, most_likely, "equal", stepped, _draws(CUT_BY_RANK, rows))
    smooth[3, 5] = float("nan")
    chosen = _choose(device, most_likely, smooth, _draws(KINDS, rows))
    if chosen.verdicts.tolist().count(Verdict.NOT_FINITE) != 1 or chosen.verdicts[3] != Verdict.NOT_FINITE:
        raise AssertionError("a row that is no number was not told from the others")


def _compare(device: Device, most_likely: MostLikely, name: str, logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    chosen = _choose(device, most_likely, logits, draws)
    tokens, verdicts = chosen.tokens.tolist(), chosen.verdicts.tolist()
    for place, (row, each) in enumerate(zip(logits.numpy(), draws, strict=True)):
        best = int(row.argmax())
        wanted = best if each.uniform is None else draw(row, best, each.params, each.uniform)
        if verdicts[place] != Verdict.SURE:
            raise AssertionError(f"{name} logits, row {place}: verdict {verdicts[place]}")
        if tokens[place] != wanted:
            raise AssertionError(f"{name} logits, row {place}, {each}: {tokens[place]}, and the host takes {wanted}")


def _choose(device: Device, most_likely: MostLikely, logits: torch.Tensor, draws: Sequence[Draw]) -> Chosen:
    tables = DrawTables.build(draws)
    arrays = [torch.from_numpy(array).to(device.torch) for array in tables.arrays]
    return DeviceChooser(most_likely).choose(logits.to(device.torch), tables, arrays)


def _draws(of: Sequence[SamplingParams], rows: int) -> list[Draw]:
    uniforms = np.random.default_rng(1).random(rows).tolist()
    kinds = [of[place % len(of)] for place in range(rows)]
    return [Draw(kind, None if kind.greedy else uniform) for kind, uniform in zip(kinds, uniforms, strict=True)]
