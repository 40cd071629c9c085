"""How keys and values are scaled in 8 bits: found at load, by one fixed text that goes through the model.

It is attended to by torch's own operations and with keys and values in 16 bits, so that nothing is cut off, and no
kernel is compiled that is not needed again.
"""

from __future__ import annotations

import logging
from datetime import datetime

import numpy as np
import torch

from engine.attention import AttentionRow
from engine.attention.base import pages_for
from engine.attention.kv_scales import FP8, Fp8, KVScales, WatchedAttention
from engine.attention.paged_kv import PagedKV
from engine.attention.torch_paged import TorchPagedAttention
from engine.devices import Device, dtype_named
from engine.link import link_to, send_inputs
from engine.models.registry import LoadedModel
from engine.text import Codec
from engine.text.api import ChatMessage

log = logging.getLogger(__name__)

_PAGE_SIZE = 16
_SOME_DAY = datetime(2026, 1, 1)  # some templates tell the date: scales must not follow it

_TEXT = """\
The harbour lay quiet until the ferry came round the point. "You're late," said the woman with the lamp, "by a year and
eleven days." Nobody answered; the rope was thrown, and somebody laughed.

## Invoice 2024-07-31
| item | count | price |
|---|---|---|
| bolts, M8 x 40 mm | 1,250 | EUR 87.50 |
| paint (RAL 5010) | 3 | $149.99 |

```python
def primes(limit: int) -> list[int]:
    sieve = bytearray([1]) * (limit + 1)
    for n in range(2, int(limit**0.5) + 1):
        if sieve[n]:
            sieve[n * n :: n] = bytes(len(sieve[n * n :: n]))
    return [n for n in range(2, limit + 1) if sieve[n]]
```

{"id": 7, "tags": ["a", "b"], "next": null} <a href="https://example.org/?q=1&r=2">more</a>

Let f(x) = x^2 - 3x + 2 = (x - 1)(x - 2); its roots are 1 and 2, and f'(x) = 0 at x = 3/2.
SELECT name FROM users WHERE id = 42;
Die Straße ist naß, über den Dächern zieht Rauch. L'été, où étais-tu ? ¿Dónde está la biblioteca, señor?
春眠不覚暁、処処聞啼鳥。 人工智能 한국어 문장 مرحبا بالعالم 🙂🚀

1. Preheat the oven to 200 degrees.   2. Whisk 4 eggs.   3. Wait.
AAAAAAAA 0000000000 -------- !!!???
Why do ships float? Because they push aside water that weighs as much as they do.
"""


def calibrate(loaded: LoadedModel, codec: Codec, kv_dtype: torch.dtype, device: Device, most: int) -> Fp8 | None:
    """For keys and values of that type; None: they are not scaled. most: tokens in a step."""
    if kv_dtype != FP8:
        return None
    attend = dtype_named(loaded.weights) if loaded.weights in ("float16", "bfloat16") else device.layout("auto").dense
    scales = _find_scales(loaded, codec, attend, device.place, most)
    large = sum(scale > 1 for scale in scales.keys)
    if large:
        log.warning(
            "the keys of %d layers are in the hundreds, for which 8 bits are too few: bfloat16 is the better kv_dtype",
            large,
        )
    return Fp8(scales, attend)


@torch.inference_mode()
def _find_scales(loaded: LoadedModel, codec: Codec, dtype: torch.dtype, place: torch.device, most: int) -> KVScales:
    """By the first tokens of the text, if the context has not room for all."""
    model, spec = loaded.model, loaded.model.spec
    tokens = codec.prompt((ChatMessage("user", _TEXT),), now=_SOME_DAY).tokens[: spec.context_length]
    shape = spec.kv_shape(pages_for(len(tokens), _PAGE_SIZE), _PAGE_SIZE, dtype)
    attention = WatchedAttention(TorchPagedAttention(PagedKV(shape, place), spec.layers), len(spec.layers), place)
    pages, link = np.arange(shape.num_pages, dtype=np.int32), link_to(place)
    loaded.adapters.plan(())
    for start in range(0, len(tokens), most):
        step = tokens[start : start + most].tolist()
        attention.plan([AttentionRow(0, pages, start, len(step), len(tokens))])
        inputs = send_inputs(link, step, range(start, start + len(step)), ())
        model.forward(inputs.tokens, inputs.positions, inputs.logit_rows, attention)
    log.info("keys and values in 8 bits: scales found with a text of %d tokens", len(tokens))
    return attention.scales()
