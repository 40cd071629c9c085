"""A place for the engine, so that everything else works while the model is being loaded."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable

from chatd.errors import ModelLoading, ModelUnavailable
from engine.api import Engine, EngineInfo, EngineSnapshot, Event, GenerateRequest, SamplingParams
from engine.errors import EngineStopped
from engine.text.api import ChatCodec

Loader = Callable[[], Engine]
"""Builds the engine, blocking. Raises what building raises."""


class EngineSlot:
    """Implements `engine.api.Engine` for an engine that comes later.

    empty ── load ── ready ── close ── closed          Until ready every call raises ModelLoading;
      └──────┴─ the loader raised ── failed            failed raises ModelUnavailable, closed EngineStopped.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def ready(self) -> bool:
        return self._engine is not None and not self._closed

    @property
    def failure(self) -> BaseException | None:
        """What the loader raised."""
        return self._failure

    async def load(self, loader: Loader) -> None:
        """Runs the loader in a thread that does not hold up the end of the process. Raises what it raises."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Engine] = loop.create_future()

        def work() -> None:
            try:
                engine = loader()
            except BaseException as error:
                _call(loop, _set_exception, loaded, error)
            else:
                _call(loop, _set_result, loaded, engine)

        threading.Thread(target=work, name="chatd-load", daemon=True).start()
        try:
            engine = await loaded
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = error
            raise
        self._engine = engine

    def _need(self) -> Engine:
        if self._closed:
            raise EngineStopped("the server is shutting down")
        if self._failure is not None:
            raise ModelUnavailable
        if self._engine is None:
            raise ModelLoading
        return self._engine

    @property
    def info(self) -> EngineInfo:
        return self._need().info

    @property
    def codec(self) -> ChatCodec:
        return self._need().codec

    def check(self, prompt_tokens: int, params: SamplingParams) -> None:
        self._need().check(prompt_tokens, params)

    def submit(self, request: GenerateRequest) -> AsyncIterator[Event]:
        return self._need().submit(request)

    def abort(self, request_id: str) -> None:
        if self._engine is not None:
            self._engine.abort(request_id)

    def snapshot(self) -> EngineSnapshot:
        return self._need().snapshot()

    async def flush(self) -> bool:
        return await self._need().flush()

    async def close(self) -> None:
        self._closed = True
        if self._engine is not None:
            await self._engine.close()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
        loop.call_soon_threadsafe(function, *arguments)


def _set_result(future: asyncio.Future[Engine], engine: Engine) -> None:
    if not future.done():
        future.set_result(engine)


def _set_exception(future: asyncio.Future[Engine], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
