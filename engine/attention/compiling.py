"""What FlashInfer needs to compile its kernels, where it does not find it by itself.

It looks for CUDA beside `nvcc`, which is no use where that is a script elsewhere in the path, and links `-lcuda`, which
containers often lack: there the driver's library comes as libcuda.so.1 alone, and when the container is started. The
one that a kernel is linked with only has to have the right name; the driver's is loaded when the kernel is. Its norms
include a header of cuBLAS, and its selection of the most likely tokens one of cuRAND, which not every CUDA folder has,
but which come with torch's wheels.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from shutil import which

_USUAL = Path("/usr/local/cuda")
_FLAGS = "FLASHINFER_EXTRA_LDFLAGS"
_CUDA_FLAGS = "FLASHINFER_EXTRA_CUDAFLAGS"
_HEADERS = ("cublasLt.h", "curand.h")


def compile_settings(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Variables to set before flashinfer is loaded; none where there is no compiler, or it needs nothing.

    folder: where a library to link with may be made.
    """
    settings = {}
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if home is None and (usual := cuda_home()) is not None:
        settings["CUDA_HOME"] = home = str(usual)
    if home is None or which("c++") is None:
        return settings
    missing = [header for header in _HEADERS if not (Path(home) / "include" / header).is_file()]
    beside_torch = dict.fromkeys(found for header in missing if (found := _folder_of_wheels(header)) is not None)
    if beside_torch:
        given = environment.get(_CUDA_FLAGS, "")
        settings[_CUDA_FLAGS] = " ".join([given, *(f"-isystem {headers}" for headers in beside_torch)]).strip()
    flags = environment.get(_FLAGS, "")
    if not _links(home, flags):
        settings[_FLAGS] = f"{flags} -L{_make_libcuda(folder)}".strip()
    return settings


def cuda_home() -> Path | None:
    """The folder with both the compiler and the runtime to link with; None: nowhere where CUDA usually is."""
    nvcc = which("nvcc")
    beside = [Path(nvcc).parent.parent, Path(nvcc).resolve().parent.parent] if nvcc is not None else []
    return next((home for home in (*beside, _USUAL) if _is_home(home)), None)


def _folder_of_wheels(header: str) -> Path | None:
    """The folder beside torch that has it: nvidia/cublas/include, nvidia/cu13/include, ..."""
    spec = find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None else None
    found = (path for place in places or () for path in sorted(Path(place).glob(f"*/include/{header}")))
    return next((path.parent for path in found), None)


def _is_home(home: Path) -> bool:
    return (home / "bin" / "nvcc").is_file() and (home / "lib64" / "libcudart.so").exists()


def _links(home: str, flags: str) -> bool:
    paths = (f"-L{home}/lib64", f"-L{home}/lib64/stubs", *flags.split())
    return _run("-shared", "-x", "c++", "/dev/null", *paths, "-lcuda", "-o", "/dev/null")


def _make_libcuda(folder: Path) -> Path:
    """An empty library with the driver's name; gives the folder that holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    soname = "-Wl,-soname,libcuda.so.1"
    _run("-shared", "-fPIC", "-x", "c++", "/dev/null", soname, "-o", str(folder / "libcuda.so"))
    return folder


def _run(*arguments: str) -> bool:
    return subprocess.run(["c++", *arguments], capture_output=True, check=False).returncode == 0
