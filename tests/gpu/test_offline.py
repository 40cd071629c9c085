"""FlashInfer from wheels and kernels that were carried along; kernels compiled in a time that is given; the entry."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from time import monotonic

import pytest
import torch

from engine.attention.kv_scales import FP8
from tests.gpu import __main__ as entry
from tests.gpu.checks import BackendName, CheckResult
from tests.gpu.kernels import HELPERS, Variant, compile_all, keep, ready, specs, use
from tests.gpu.offline import install_command, provide_flashinfer
from tests.gpu.operations import Mixed

ROOT = Path(__file__).parents[2]
WHEELS = ("apache_tvm_ffi-0.1.15-cp312-cp312-manylinux_2_28_x86_64.whl", "flashinfer_python-0.6.13-py3-none-any.whl")


class Pip:
    """Stands in for pip; returns `code`."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.commands: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        return subprocess.CompletedProcess(list(command), self.code, "", "first line\nERROR: no space left\n")


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer is not installed; what is set for it is undone at the end."""
    monkeypatch.setattr("tests.gpu.offline.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PATH", os.environ["PATH"])


def test_what_is_installed_stays(tmp_path: Path) -> None:
    pip = Pip()
    assert provide_flashinfer(tmp_path, tmp_path / "site", pip) == "installed"
    assert pip.commands == []


@pytest.mark.usefixtures("missing")
def test_wheels_go_into_a_folder_of_their_own(tmp_path: Path) -> None:
    for name in WHEELS:
        (tmp_path / name).touch()
    pip, site = Pip(), tmp_path / "site"
    assert provide_flashinfer(tmp_path, site, pip) == f"from 2 wheels in {tmp_path}"
    assert sys.path[0] == str(site)
    assert os.environ["PATH"].split(os.pathsep)[0] == str(site / "bin")
    assert pip.commands == [install_command([tmp_path / name for name in WHEELS], site)]
    assert {"--no-index", "--no-deps"} <= set(pip.commands[0])
    assert pip.commands[0][-4:] == ["--target", str(site), *(str(tmp_path / name) for name in WHEELS)]


@pytest.mark.usefixtures("missing")
def test_without_wheels_or_when_pip_fails_it_is_said(tmp_path: Path) -> None:
    before = list(sys.path)
    assert "make gpu-wheels" in provide_flashinfer(tmp_path, tmp_path / "site", Pip())
    (tmp_path / WHEELS[1]).touch()
    assert "ERROR: no space left" in provide_flashinfer(tmp_path, tmp_path / "site", Pip(code=1))
    assert sys.path == before


def test_libraries_are_used_from_where_they_were_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled by one ninja, each is copied once, and is then no longer compiled at its first use."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    env = import_module("flashinfer.jit.env")
    monkeypatch.setattr(env, "FLASHINFER_AOT_DIR", env.FLASHINFER_AOT_DIR)
    monkeypatch.setattr(env, "FLASHINFER_JIT_DIR", tmp_path / "compiled")
    monkeypatch.setattr(env, "FLASHINFER_GEN_SRC_DIR", tmp_path / "sources")
    monkeypatch.setattr("flashinfer.jit.core.check_cuda_arch", lambda: None)
    use(tmp_path / "kept")
    wanted = [Variant(torch.bfloat16, 128), Variant(torch.float16, 64, window=True, kv=FP8)]
    assert ready(wanted) == frozenset()
    described = specs(wanted)
    assert set(described) == {*HELPERS, *wanted}
    for name in ("page", wanted[1]):
        library = described[name].jit_library_path
        library.parent.mkdir(parents=True)
        library.write_text("a library")
    assert ready(wanted) == frozenset()
    assert (keep(wanted), keep(wanted)) == (2, 0)
    assert ready(wanted) == {"page", wanted[1]}
    assert (tmp_path / "kept" / "page" / "page.so").read_text() == "a library"


def test_compiling_ends_when_its_time_is_up() -> None:
    started = monotonic()
    compile_all(0.3, (sys.executable, "-c", "import time; time.sleep(600)"))
    assert monotonic() - started < 60
    compile_all(600.0, (sys.executable, "-c", ""))
    assert monotonic() - started < 120


def test_without_a_device_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert entry.main([]) == 2
    assert capsys.readouterr().out == "There is no CUDA device here: nothing was checked.\n"


PLAIN = frozenset({Variant(torch.bfloat16, 128), "page"})


@pytest.mark.parametrize(
    ("kernels", "passed", "usable"),
    [
        (PLAIN, ["flashinfer", "torch-paged"], ["flashinfer", "torch-paged"]),
        (None, ["flashinfer", "torch-paged"], ["flashinfer", "torch-paged"]),
        (PLAIN, ["torch-paged"], ["torch-paged"]),
        (frozenset(), ["flashinfer", "torch-paged"], ["torch-paged"]),
        (PLAIN, [], []),
    ],
)
def test_what_is_worth_measuring(
    kernels: frozenset[Variant | str] | None, passed: list[str], usable: list[str]
) -> None:
    there: list[BackendName] = ["flashinfer", "torch-paged"]
    checks = [CheckResult(f"{name}: heads of 64", "passed" if name in passed else "failed", "", 1.0) for name in there]
    checks.append(CheckResult("flashinfer: norm", "passed", "", 1.0))
    assert entry.usable_backends(there, kernels, checks) == usable


def test_small_operations_that_are_right_are_measured_with() -> None:
    passed, failed = (
        CheckResult(f"flashinfer: {name}", outcome, "", 1.0)
        for name, outcome in (("norm", "passed"), ("rope", "failed"))
    )
    gate = CheckResult("flashinfer: silu_and_mul", "passed", "", 1.0)
    assert entry.fused_operations(None, [passed, failed, gate]) == ["norm", "silu_and_mul"]
    assert entry.fused_operations(frozenset({"norm", "rope"}), [passed, failed, gate]) == ["norm"]
    assert isinstance(entry.operations_of([]), Mixed)


LACKING = [
    "llvmlite",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "llguidance",
    "pydantic",
    "pytest",
    "hypothesis",
]


def test_nothing_is_loaded_that_a_bare_machine_lacks() -> None:
    """Of what chatd depends on, torch and numpy alone, in whatever version."""
    code = """
import sys
from importlib.abc import MetaPathFinder
wanted = sys.argv[1:]
class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in wanted:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import tests.gpu.__main__
print(sorted({m.split(".")[0] for m in sys.modules} & {"chatd", "sessions", *wanted}))
"""
    done = subprocess.run([sys.executable, "-c", code, *LACKING], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
