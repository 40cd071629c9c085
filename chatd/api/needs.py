"""What routes ask for, as FastAPI dependencies."""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastapi import Depends, Path
from starlette.requests import HTTPConnection

from chatd.backend import Backend
from chatd.schemas import Id, ProblemOut


def _backend(connection: HTTPConnection) -> Backend:
    return cast(Backend, connection.app.state.backend)


NeedsBackend = Annotated[Backend, Depends(_backend)]
SessionId = Annotated[Id, Path(description="a session's id, ses_...")]
GenerationId = Annotated[Id, Path(description="a generation's id, gen_...")]

PROBLEMS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ProblemOut}, "5XX": {"model": ProblemOut}}
