"""Keys and values of all sequences in pages, for the backends that attend to pages directly.

    kv  [layers, num_pages + 1, 2, page_size, kv_heads, head_dim]          2: keys, values

Within a page the order is token, head, element (FlashInfer's NHD): it is the one that flash-attn reads too, and the
one in which a token's new keys are written in one piece. A page of a layer is one stretch of memory. The last page
belongs to nobody: rows that only fill up a batch may write there.

In e4m3 an element is stored divided by the scale of its layer (kv_scales.py). torch has few operations on such tensors,
so that pages are moved as plain bytes.
"""

from __future__ import annotations

import torch

from cache import TailCopy
from engine.attention.base import KVShape
from engine.attention.kv_scales import FP8, KVScales, from_fp8, to_fp8
from engine.errors import AttentionUnavailable

DTYPES = (torch.float32, torch.float16, torch.bfloat16, FP8)


class PagedKV:
    """Storage of num_pages + 1 pages on `device`. Everything is done in the order of the device's current stream."""

    def __init__(
        self,
        shape: KVShape,
        device: torch.device,
        scales: KVScales | None = None,
        attend_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """scales, attend_dtype: for e4m3 alone; None: 1.0 for all layers.

        Raises AttentionUnavailable for a dtype in which nothing can be kept.
        """
        if shape.dtype not in DTYPES:
            raise AttentionUnavailable(f"paged attention keeps no keys and values in {shape.dtype}")
        self._scales = scales if scales is not None else KVScales.ones(shape.num_layers)
        if len(self._scales.keys) != shape.num_layers:
            raise ValueError(f"{shape.num_layers} layers, but the scales of {len(self._scales.keys)}")
        self.shape = shape
        self.device = device
        self.attend_dtype = attend_dtype if shape.dtype == FP8 else shape.dtype
        sizes = (shape.num_layers, shape.num_pages + 1, 2, shape.page_size, shape.num_kv_heads, shape.head_dim)
        stored = torch.uint8 if shape.dtype == FP8 else shape.dtype
        self._kv = torch.zeros(sizes, dtype=stored, device=device)

    @property
    def spare_page(self) -> int:
        """The number of the page that belongs to nobody."""
        return self.shape.num_pages

    @property
    def scaled(self) -> bool:
        """Elements are stored divided by `scales`."""
        return self.shape.dtype == FP8

    def scales(self, layer: int) -> tuple[float, float]:
        """Of keys and of values."""
        return self._scales.keys[layer], self._scales.values[layer]

    def layer(self, index: int) -> torch.Tensor:
        """[num_pages + 1, 2, page_size, kv_heads, head_dim], a view."""
        return self._kv[index].view(self.shape.dtype)

    def stored(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v as pages hold them."""
        if not self.scaled:
            return k.to(self.shape.dtype), v.to(self.shape.dtype)
        for_keys, for_values = self.scales(layer)
        return to_fp8(k, for_keys), to_fp8(v, for_values)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """k and v [T, kv_heads, head_dim] go to the slots, [T] int32; slot = page * page_size + offset."""
        size = self.shape.page_size
        pages, offsets = torch.div(slots, size, rounding_mode="floor"), slots % size
        kv = self._kv[layer]
        for part, new in enumerate(self.stored(layer, k, v)):
            kv[pages, part, offsets] = new.view(kv.dtype)

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the slots, [T] int32: two copies, [T, kv_heads, head_dim] in `attend_dtype`."""
        size = self.shape.page_size
        pages, offsets = torch.div(slots, size, rounding_mode="floor"), slots % size
        kv = self._kv[layer]
        keys, values = (kv[pages, part, offsets].view(self.shape.dtype) for part in (0, 1))
        if not self.scaled:
            return keys, values
        for_keys, for_values = self.scales(layer)
        return from_fp8(keys, for_keys, self.attend_dtype), from_fp8(values, for_values, self.attend_dtype)

    def clear(self, pages: torch.Tensor) -> None:
        """Zeros in all layers of the pages, [F] int32.

        A kernel multiplies what is behind the end of a sequence by a probability of zero, and 0 * NaN is NaN.
        """
        if len(pages):
            self._kv.index_fill_(1, pages.long(), 0)

    def copy_tail(self, tail: TailCopy) -> None:
        """The first n_tokens of page src to page dst, zeros behind them."""
        self._kv[:, tail.dst, :, : tail.n_tokens] = self._kv[:, tail.src, :, : tail.n_tokens]
        self._kv[:, tail.dst, :, tail.n_tokens :] = 0
