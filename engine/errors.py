"""What can go wrong in the engine, as types. chatd/errors.py translates them once."""

from __future__ import annotations


class EngineError(Exception):
    """The base of everything that engine/ raises on purpose."""


class ModelError(EngineError):
    """A model cannot be found, read or used. The message names the file and what to do."""


class AttentionUnavailable(ModelError):
    """The attention backend that was asked for cannot serve this model on this machine. The message says why."""


class DeviceUnavailable(ModelError):
    """The device that was asked for is not there."""


class OutOfDeviceMemory(ModelError):
    """A model and its pool do not fit into the memory of a device."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the device's memory does not suffice: {what}. Lower gpu_memory_utilization, pool_tokens, "
            "max_batched_tokens, max_running or context_length, or choose a narrower dtype or kv_dtype"
        )


class DeviceLost(EngineError):
    """The device answers every call with an error from now on."""


class RequestError(EngineError):
    """The request itself is at fault and would fail again."""


class InvalidRequest(RequestError):
    """Ids outside the vocabulary, an empty prompt, an id that is in use already, or an adapter that is not loaded."""


class RequestTooLong(RequestError):
    """prompt_tokens + max_tokens do not fit into limit (the context or the pool), all in tokens."""

    def __init__(self, prompt_tokens: int, max_tokens: int | None, limit: int, what: str) -> None:
        self.prompt_tokens, self.max_tokens, self.limit, self.what = prompt_tokens, max_tokens, limit, what
        asked = f"{prompt_tokens} prompt tokens" + (f" + {max_tokens} max_tokens" if max_tokens else "")
        super().__init__(f"{asked} do not fit: the {what} holds {limit} tokens")


class QueueFull(EngineError):
    """Too many requests wait already; try again after `retry_after` seconds."""

    def __init__(self, waiting: int, retry_after: int = 2) -> None:
        self.waiting, self.retry_after = waiting, retry_after
        super().__init__(f"{waiting} requests are waiting already")


class EngineStopped(EngineError):
    """The engine is shutting down or has ended."""


class EngineBroken(EngineStopped):
    """The engine has ended by a fault of its own."""
