"""What FlashInfer is told about CUDA, as a table of machines made of folders."""

from __future__ import annotations

import subprocess
from pathlib import Path
from shutil import which

import pytest

from engine.attention import compiling
from engine.attention.compiling import compile_settings, cuda_home

needs_compiler = pytest.mark.skipif(which("c++") is None, reason="no C++ compiler")


def make_cuda(home: Path, *, runtime: bool = True) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").touch(mode=0o755)
    (home / "lib64").mkdir()
    if runtime:
        (home / "lib64" / "libcudart.so").touch()
    return home


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CUDA's usual folder is one that does not exist, and the path has only the compiler of the system."""
    monkeypatch.setattr(compiling, "_USUAL", tmp_path / "usual")
    (tmp_path / "path").mkdir()
    if (compiler := which("c++")) is not None:
        (tmp_path / "path" / "c++").symlink_to(compiler)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    return tmp_path


def test_no_compiler_of_cuda(elsewhere: Path) -> None:
    assert cuda_home() is None
    assert compile_settings({}, elsewhere / "made") == {}


def test_a_script_in_the_path_is_not_beside_cuda(elsewhere: Path) -> None:
    (elsewhere / "path" / "nvcc").touch(mode=0o755)
    assert cuda_home() is None
    assert cuda_home() != elsewhere
    make_cuda(elsewhere / "usual")
    assert cuda_home() == elsewhere / "usual"


def test_a_link_in_the_path_leads_to_cuda(elsewhere: Path) -> None:
    home = make_cuda(elsewhere / "cuda-13.0")
    (elsewhere / "path" / "nvcc").symlink_to(home / "bin" / "nvcc")
    assert cuda_home() == home


def test_a_compiler_without_the_runtime_is_no_use(elsewhere: Path) -> None:
    make_cuda(elsewhere / "usual", runtime=False)
    assert cuda_home() is None


@needs_compiler
def test_what_is_set_already_stays(elsewhere: Path) -> None:
    make_cuda(elsewhere / "usual")
    given = {"CUDA_HOME": "/opt/cuda", "FLASHINFER_EXTRA_LDFLAGS": "-L/opt/lib"}
    settings = compile_settings(given, elsewhere / "made")
    assert "CUDA_HOME" not in settings
    assert settings.get("FLASHINFER_EXTRA_LDFLAGS", "-L/opt/lib").startswith("-L/opt/lib")


@needs_compiler
def test_a_library_to_link_with_is_made_where_there_is_none(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cuda(elsewhere / "usual")
    monkeypatch.setattr(compiling, "_links", lambda home, flags: False)
    settings = compile_settings({}, elsewhere / "made")
    assert settings == {
        "CUDA_HOME": str(elsewhere / "usual"),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{elsewhere / 'made'}",
    }
    monkeypatch.undo()
    target = elsewhere / "kernel.so"
    flags = settings["FLASHINFER_EXTRA_LDFLAGS"]
    subprocess.run(["c++", "-shared", "-x", "c++", "/dev/null", flags, "-lcuda", "-o", str(target)], check=True)
    assert target.exists()


@needs_compiler
def test_headers_come_from_torch_where_cuda_has_none(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one folder or in several, as wheels for CUDA 13 and 12 have them."""
    home = make_cuda(elsewhere / "usual")
    one, blas, rand = (elsewhere / "site" / "nvidia" / name / "include" for name in ("cu13", "cublas", "curand"))
    for folder in (one, blas, rand, home / "include"):
        folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(elsewhere / "site")

    def told(given: str = "") -> str | None:
        return compile_settings({"FLASHINFER_EXTRA_CUDAFLAGS": given}, elsewhere / "made").get(
            "FLASHINFER_EXTRA_CUDAFLAGS"
        )

    assert told() is None
    (blas / "cublasLt.h").touch()
    (rand / "curand.h").touch()
    assert told() == f"-isystem {blas} -isystem {rand}"
    (blas / "cublasLt.h").rename(one / "cublasLt.h")
    (rand / "curand.h").rename(one / "curand.h")
    assert told("-lineinfo") == f"-lineinfo -isystem {one}"
    (home / "include" / "cublasLt.h").touch()
    assert told() == f"-isystem {one}"
    (home / "include" / "curand.h").touch()
    assert told() is None


@needs_compiler
def test_a_library_that_is_there_is_used(elsewhere: Path) -> None:
    home = make_cuda(elsewhere / "usual")
    compiling._make_libcuda(home / "lib64" / "stubs")
    assert compile_settings({}, elsewhere / "made") == {"CUDA_HOME": str(home)}
