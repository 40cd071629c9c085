"""The line below an answer."""

from __future__ import annotations

from typing import Any


def stats_line(usage: dict[str, Any] | None, timings: dict[str, Any] | None) -> str:
    """prompt 1,204 (cached 1,152) · TTFT 43 ms · 88 tok/s, as far as the server measured.

    The speed counts the tokens after the first over the time between the first and the last.
    """
    parts: list[str] = []
    if usage is not None:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        parts.append(f"prompt {usage['prompt_tokens']:,} (cached {cached:,})")
    if timings is not None and timings["ttft_ms"] is not None:
        parts.append(f"TTFT {timings['ttft_ms']:,.0f} ms")
    if usage is not None and timings is not None and usage["completion_tokens"] > 1 and timings["decode_ms"] > 0:
        parts.append(f"{(usage['completion_tokens'] - 1) * 1000 / timings['decode_ms']:,.0f} tok/s")
    return " · ".join(parts)
