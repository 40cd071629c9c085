"""FlashInfer's kernels that the checks and measurements need, compiled in one go, on all cores.

    python -m tests.gpu.kernels FOLDER [ARCHITECTURE]

compiles what is not in the folder yet, which needs no card if the architecture is given (9.0a: H100 and H200), only
CUDA's compiler. So they can be made elsewhere and carried along.

    FOLDER / name / name.so      as FlashInfer looks for libraries that came with it, before it compiles any

What is compiled in one go has to be put there: else FlashInfer compiles it again when it is first used, since each of
its libraries has a ninja of its own, which does not know what another one did.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.attention.base import LayerAttention
from engine.attention.compiling import compile_settings

OPERATIONS = ("norm", "rope", "silu_and_mul")
HELPERS = ("page", "cascade", "topk", *OPERATIONS)


@dataclass(frozen=True, slots=True)
class Variant:
    """What FlashInfer compiles one library for. kv: the dtype of keys and values, None: that of queries."""

    dtype: torch.dtype
    head_dim: int
    window: bool = False
    softcap: bool = False
    kv: torch.dtype | None = None

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.kv if self.kv is not None else self.dtype


def variants_of(
    layers: Iterable[LayerAttention], dtype: torch.dtype, head_dim: int, kv: torch.dtype | None = None
) -> list[Variant]:
    """Which libraries layers with such attention need."""
    kinds = dict.fromkeys((layer.window is not None, layer.softcap is not None) for layer in layers)
    return [Variant(dtype, head_dim, window, softcap, kv) for window, softcap in kinds]


def specs(variants: Sequence[Variant]) -> dict[Variant | str, Any]:
    """FlashInfer's descriptions of what is compiled, those of HELPERS by name."""
    from flashinfer.jit import gen_batch_prefill_module
    from flashinfer.jit.activation import gen_act_and_mul_module
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.norm import gen_norm_module
    from flashinfer.jit.page import gen_page_module
    from flashinfer.jit.rope import gen_rope_module
    from flashinfer.jit.topk import gen_topk_module

    helpers = (gen_page_module(), gen_cascade_module(), gen_topk_module())
    operations = (gen_norm_module(), gen_rope_module(), gen_act_and_mul_module("silu"))
    made: dict[Variant | str, Any] = dict(zip(HELPERS, (*helpers, *operations), strict=True))
    for one in dict.fromkeys(variants):
        sizes = (torch.int32, one.head_dim, one.head_dim, 0)
        made[one] = gen_batch_prefill_module(
            "fa2", one.dtype, one.kv_dtype, one.dtype, *sizes, one.window, one.softcap, False
        )
    return made


def use(folder: Path) -> None:
    """FlashInfer takes libraries from this folder, unless it came with all of them (flashinfer-jit-cache)."""
    from flashinfer.jit import env

    if not env.has_flashinfer_jit_cache():
        env.FLASHINFER_AOT_DIR = folder.resolve()  # meant to be set so (flashinfer/jit/env.py)


def compile_all(seconds: float, command: Sequence[str]) -> None:
    """In a process of its own, which is ended with all that it started when the time is up."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def compile_command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.gpu.kernels", str(folder)]


def ready(variants: Sequence[Variant]) -> frozenset[Variant | str]:
    """Which of them are loaded as they are."""
    return frozenset(name for name, spec in specs(variants).items() if spec.is_aot)


def keep(variants: Sequence[Variant]) -> int:
    """Puts those that are compiled to where they are used from; gives their number."""
    compiled = [spec for spec in specs(variants).values() if not spec.is_aot and spec.is_compiled]
    for spec in compiled:
        spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(spec.jit_library_path, spec.aot_path)
    return len(compiled)


def build(wanted: Sequence[Any]) -> None:
    """All at once. Where one of them cannot be compiled, ninja ends: then one by one."""
    from flashinfer.jit.core import build_jit_specs

    try:
        build_jit_specs(list(wanted))
    except RuntimeError as error:
        print("\n".join(line for line in str(error).splitlines() if "error" in line), file=sys.stderr)
        for spec in wanted if len(wanted) > 1 else ():
            build([spec])


def main(arguments: Sequence[str]) -> None:
    from tests.gpu.checks import VARIANTS

    folder = Path(arguments[0])
    if len(arguments) > 1:
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = arguments[1]
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(folder.resolve().parents[1]))
    os.environ.update(compile_settings(os.environ, folder.resolve().parents[1] / "link"))
    use(folder)
    described = specs(VARIANTS)
    build([spec for name, spec in described.items() if name not in OPERATIONS])
    for name in OPERATIONS:  # less is lost without them
        build([described[name]])
    print(f"{keep(VARIANTS)} libraries compiled, {len(ready(VARIANTS))} in {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
