"""FlashInfer where nothing can be downloaded: from wheels that were carried along, into a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def provide_flashinfer(wheels: Path, site: Path, run: Run | None = None) -> str:
    """Makes `import flashinfer` work if that is possible; says in one line where it comes from, or why not."""
    if find_spec("flashinfer") is not None:
        return "installed"
    found = sorted(wheels.glob("*.whl"))
    if not any(wheel.name.startswith("flashinfer_python-") for wheel in found):
        return f"not installed, and no wheel of it in {wheels} (make gpu-wheels collects them)"
    done = (run if run is not None else _run)(install_command(found, site))
    if done.returncode != 0:
        return f"not installed: pip failed with {done.stderr.strip().splitlines()[-1:]}"
    sys.path.insert(0, str(site))
    invalidate_caches()
    os.environ["PATH"] = f"{site / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"  # ninja, for compiling
    return f"from {len(found)} wheels in {wheels}"


def install_command(wheels: Sequence[Path], site: Path) -> list[str]:
    """No index, and nothing that the wheels would want besides: torch and its companions stay as they are."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    return [*pip, "--target", str(site), *map(str, wheels)]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
