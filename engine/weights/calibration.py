"""How large the inputs of a model's layers get, channel by channel: what its smoothing is computed from.

The model reads a short text of its own kind of work (calibration.txt: prose, code, a list, a dialogue).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

import numpy as np
import torch

from engine.adapters.batch import Adapters
from engine.attention import AttentionRow, TorchAttention
from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder
from engine.quant import Linear
from engine.text.assets import ChatAssets
from engine.text.codec import Codec, Ids

MASSIVE = 25.0
"""Times the median of a layer's channels. In some layers, mostly the `down` of a few, single tokens are massive (arXiv
2402.17762), which no scale of a channel evens out."""
MOST_TOKENS = 640
PAGE_SIZE = 16


class _Observer(Adapters):
    """Stands where adapters do: between a layer and its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks: dict[str, torch.Tensor] = {}

    def adapt(self, name: str, linear: Linear, dtype: torch.dtype) -> Linear:
        def observed(x: torch.Tensor) -> torch.Tensor:
            largest = x.float().abs().amax(0)
            self.peaks[name] = torch.maximum(self.peaks.get(name, largest), largest)
            return linear(x)

        return observed


@torch.inference_mode()
def input_peaks(
    config: DecoderConfig, tensors: Mapping[str, torch.Tensor], assets: ChatAssets
) -> dict[str, torch.Tensor]:
    """Layer to the largest |x| of each of its inputs, [K] float32, but for layers of massive ones. tensors: dense."""
    observer = _Observer()
    decoder = Decoder(config, tensors, observer)
    tokens = torch.from_numpy(_tokens(config.vocab_size, assets).astype(np.int64))
    length = min(len(tokens), config.context_length)
    pages = np.arange(-(-length // PAGE_SIZE), dtype=np.int32)
    attention = TorchAttention(decoder.spec.kv_shape(len(pages), PAGE_SIZE, torch.bfloat16), decoder.spec.layers)
    for part in tokens.split(length):
        attention.plan([AttentionRow(0, pages, 0, len(part), length)])
        decoder.forward(part, torch.arange(len(part)), torch.empty(0, dtype=torch.int64), attention)
        attention.drop(0)
    return {name: peaks for name, peaks in observer.peaks.items() if peaks.amax() <= MASSIVE * peaks.median()}


def _tokens(vocab_size: int, assets: ChatAssets) -> Ids:
    """The text, or ids spread over the vocabulary where the tokenizer has no words for it."""
    text = resources.files("engine.weights").joinpath("calibration.txt").read_text(encoding="utf-8")
    try:
        tokens = Codec(assets).encode(text)[:MOST_TOKENS]
    except Exception:  # of a tokenizer that cannot be used: whoever serves the model is told, a conversion need not be
        tokens = np.empty(0, dtype=np.int32)
    if len(np.unique(tokens)) > 1 and int(tokens.max()) < vocab_size:
        return tokens
    return np.linspace(0, vocab_size - 1, min(MOST_TOKENS, vocab_size)).astype(np.int32)
