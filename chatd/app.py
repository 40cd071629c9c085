"""The app factory: routes, errors and guards around one backend."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from chatd import chatd_version
from chatd.api import generations, info, openai, ws
from chatd.api import sessions as session_routes
from chatd.backend import Backend
from chatd.errors import ChatdError, problem_of
from chatd.guards.addresses import HostList, OriginList
from chatd.guards.guard import Guard
from chatd.static import DIST, Pages
from chatd.ws.timing import MAX_FRAME_BYTES
from engine.errors import EngineError
from sessions import SessionsError

logger = logging.getLogger(__name__)


def create_app(backend: Backend, pages: Path = DIST) -> ASGIApp:
    """An ASGI app that serves this backend, and nothing that outlives it. pages: the folder of the built page."""
    app = FastAPI(title="chatd", version=chatd_version(), docs_url=None, redoc_url=None)
    app.state.backend = backend
    for router in (session_routes.router, generations.router, info.router, ws.router, openai.router):
        app.include_router(router)
    page = Pages(pages)
    app.router.routes.append(Route("/", page.index, methods=["GET"]))
    app.router.routes.append(Route("/assets/{name:path}", page.asset, methods=["GET"]))
    for kind in (SessionsError, EngineError, ChatdError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer)
    settings = backend.settings
    hosts = HostList(settings.host, settings.allowed_hosts)
    return Guard(app, hosts, OriginList(settings.allowed_origins), MAX_FRAME_BYTES)


async def _answer(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    request_id = request.state.request_id
    if problem.status == 500:
        logger.error("request %s failed", request_id, exc_info=error)
    headers = {**(getattr(error, "headers", None) or {}), **problem.headers}
    if request.url.path.startswith("/v1/"):
        if problem.code == "invalid_input":
            problem = problem.as_bad_request()
        return JSONResponse(problem.openai_json(), problem.status, headers)
    content: dict[str, Any] = problem.problem_json(request_id)
    return JSONResponse(content, problem.status, headers, media_type="application/problem+json")
