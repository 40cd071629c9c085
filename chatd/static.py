"""The page: files built into web/dist, served with the caching and compression that their names allow."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

DIST = Path(__file__).resolve().parents[1] / "web" / "dist"
_COMPRESSIBLE = ("text/", "application/javascript", "application/json", "image/svg+xml")
_NOT_BUILT = "chatd is running. Its page is not built: run `make setup`, or `npm ci && npm run build` in web/.\n"


@dataclass(frozen=True, slots=True)
class _File:
    modified_ns: int
    media_type: str
    etag: str
    body: bytes
    compressed: bytes | None


class Pages:
    """Serves `index.html` and the hashed files under `assets/`; each is read and compressed once for each version."""

    def __init__(self, folder: Path = DIST) -> None:
        self._folder = folder
        self._files: dict[str, _File] = {}

    async def index(self, request: Request) -> Response:
        file = await self._file("index.html")
        if file is None:
            return PlainTextResponse(_NOT_BUILT)
        return self._response(request, file, "no-cache")

    async def asset(self, request: Request) -> Response:
        """Raises HTTPException 404."""
        name = request.path_params["name"]
        file = None if "/" in name or "\\" in name or name.startswith(".") else await self._file(f"assets/{name}")
        if file is None:
            raise HTTPException(404)
        return self._response(request, file, "public, max-age=31536000, immutable")

    def _response(self, request: Request, file: _File, cache_control: str) -> Response:
        headers = {"Cache-Control": cache_control, "ETag": file.etag, "Vary": "Accept-Encoding"}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        body = file.body
        if file.compressed is not None and "gzip" in request.headers.get("accept-encoding", ""):
            body = file.compressed
            headers["Content-Encoding"] = "gzip"
        return Response(body, headers=headers, media_type=file.media_type)

    async def _file(self, name: str) -> _File | None:
        path = self._folder / name
        try:
            modified_ns = path.stat().st_mtime_ns
            known = self._files.get(name)
            if known is None or known.modified_ns != modified_ns:
                known = self._files[name] = await asyncio.to_thread(_read, path, modified_ns)
        except (OSError, ValueError):
            return None
        return known


def _read(path: Path, modified_ns: int) -> _File:
    body = path.read_bytes()
    media_type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    compressed = gzip.compress(body, 9, mtime=0) if media_type.startswith(_COMPRESSIBLE) else None
    etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    return _File(modified_ns, media_type, etag, body, compressed)
