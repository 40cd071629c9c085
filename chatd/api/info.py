"""What the server is and how it is: /api/v1/info, /health, /ready, /metrics."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from chatd import chatd_version
from chatd.api.needs import NeedsBackend
from chatd.metrics import CONTENT_TYPE
from chatd.schemas import InfoOut
from chatd.ws.timing import MAX_FRAME_BYTES
from sessions import SessionsError

router = APIRouter(tags=["server"])


@router.get("/api/v1/info", responses={200: {"model": InfoOut}})
async def info(backend: NeedsBackend) -> Response:
    settings = backend.settings
    loaded = backend.engine.info if backend.slot.ready else None
    return JSONResponse(
        {
            "model": settings.model_name,
            "context_length": settings.context_length if loaded is None else loaded.context_length,
            "version": chatd_version(),
            "limits": {"max_message_bytes": MAX_FRAME_BYTES},
            "page_size": settings.page_size if loaded is None else loaded.page_size,
            "prefix_cache": settings.prefix_cache,
            "adapters": [adapter.name for adapter in settings.adapter],
        }
    )


@router.get("/health")
async def health() -> Response:
    """The process answers."""
    return JSONResponse({"status": "ok"})


@router.get("/ready")
async def ready(backend: NeedsBackend) -> Response:
    """Turns can be taken: 200 ready, or 503 with loading, failed, draining or storage_busy."""
    status = "ready"
    if backend.draining.is_set():
        status = "draining"
    elif backend.slot.failure is not None:
        status = "failed"
    elif not backend.slot.ready:
        status = "loading"
    elif backend.slot.snapshot().broken:
        status = "failed"
    else:
        try:
            await backend.store.ping()
        except SessionsError:
            status = "storage_busy"
    return JSONResponse({"status": status}, 200 if status == "ready" else 503)


@router.get("/metrics")
async def metrics(backend: NeedsBackend) -> Response:
    """Prometheus' text format."""
    return Response(backend.metrics.render(), media_type=CONTENT_TYPE)
