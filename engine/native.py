"""What this processor does by itself."""

from __future__ import annotations

import torch


def multiplies_bfloat16() -> bool:
    """Without native support bfloat16 products are some eight times slower than float32 ones."""
    native: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return native
