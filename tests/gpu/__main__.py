"""Checks attention and 8-bit products on the CUDA device that there is, measures, prints one table: `make test-gpu`.

Exit code: 0 all checks passed, 1 one failed, 2 there is no CUDA device, 3 none failed but some were left out.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic

import torch

from engine.attention.compiling import compile_settings
from tests.gpu.budget import Budget
from tests.gpu.checks import SHARED, VARIANTS, BackendName, CheckResult, all_checks, backends_there, run_checks
from tests.gpu.costs import Shape, own_layers
from tests.gpu.decoder import RandomDecoder
from tests.gpu.device import Cuda, Device, find_device
from tests.gpu.kernels import HELPERS, OPERATIONS, Variant, compile_all, compile_command, keep, ready, use
from tests.gpu.measure import all_measurements, measure_card, run_all
from tests.gpu.offline import provide_flashinfer
from tests.gpu.operations import Fused, Mixed, Operations, Plain
from tests.gpu.products import product_checks
from tests.gpu.report import Report, Row

FOLDER = Path(".gpu")
_FOR_CHECKS = 60.0  # seconds kept for them while kernels are compiled
_FOR_MEASUREMENTS = 170.0  # seconds kept for them while kernels are compiled and checks run


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    budget = Budget.begin(options.seconds, monotonic)
    device = find_device()
    if device is None:
        print("There is no CUDA device here: nothing was checked.")
        return 2
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(options.folder.resolve()))
    about = {"device": device.name, "torch": torch.__version__, "Python": platform.python_version()}
    about["FlashInfer"] = _flashinfer(options.folder)
    backends = backends_there()
    kernels = _compile(backends, budget, device, options.folder)
    say(f"{'all' if kernels is None else len(kernels)} libraries ready after {budget.spent:.0f} s; checks")
    wanted = [*product_checks(device), *all_checks(device, backends)]
    checks = run_checks(wanted, _reserved(budget, options.checks_only), kernels)
    usable = usable_backends(backends, kernels, checks)
    rows = [] if options.checks_only else _measure(device, usable, kernels, checks, budget, about)
    report = Report(about, checks, rows, budget.spent)
    report.write_json(options.json)
    print(report.markdown())
    return report.exit_code


def usable_backends(
    backends: Sequence[BackendName], kernels: frozenset[Variant | str] | None, checks: Sequence[CheckResult]
) -> list[BackendName]:
    """Those worth measuring: with the kernels that a plain layer in bfloat16 needs, and attention that was right."""
    needed = {Variant(torch.bfloat16, 128), "page"}
    right = (check.name for check in checks if check.outcome == "passed" and "heads of" in check.name)
    passed = {name.split(":")[0] for name in right}
    compiled = [name for name in backends if name == "torch-paged" or kernels is None or needed <= kernels]
    return [name for name in compiled if name in passed]


def fused_operations(kernels: frozenset[Variant | str] | None, checks: Sequence[CheckResult]) -> list[str]:
    """FlashInfer's small operations that are compiled and right."""
    passed = {check.name for check in checks if check.outcome == "passed"}
    there = [name for name in OPERATIONS if kernels is None or name in kernels]
    return [name for name in there if f"flashinfer: {name}" in passed]


def shares(checks: Sequence[CheckResult]) -> bool:
    """Whether shared pages are read once, and rightly."""
    found = [check.outcome for check in checks if check.name.endswith(SHARED)]
    return bool(found) and set(found) == {"passed"}


def operations_of(fused: Collection[str]) -> Operations:
    plain = Plain()
    return Mixed(*(Fused() if name in fused else plain for name in OPERATIONS))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make test-gpu", description=__doc__)
    parser.add_argument("--seconds", type=float, default=460.0, help="for everything, compiling included")
    parser.add_argument("--json", type=Path, default=FOLDER / "report.json", help="where the figures go")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="wheels, kernels and what is installed of them")
    parser.add_argument("--checks-only", action="store_true", help="measure nothing")
    return parser.parse_args(arguments)


def _flashinfer(folder: Path) -> str:
    """Its version and where it came from."""
    source = provide_flashinfer(folder / "wheels", folder / "site")
    try:
        return f"{version('flashinfer-python')}, {source}"
    except PackageNotFoundError:
        return source


def architecture(device: torch.device) -> str:
    """As FlashInfer writes it: 8.0, 9.0a, 10.0a."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}{'a' if major >= 9 else ''}"


def _compile(
    backends: Sequence[BackendName], budget: Budget, device: Cuda, folder: Path
) -> frozenset[Variant | str] | None:
    """What of FlashInfer need not be compiled any more; None: all that there is; nothing where it cannot be loaded."""
    if "flashinfer" not in backends:
        return frozenset()
    os.environ.update(compile_settings(os.environ, folder.resolve() / "link"))
    try:
        if import_module("flashinfer.jit.env").has_flashinfer_jit_cache():
            return None
        kernels = folder / "kernels" / architecture(device.torch)
        use(kernels)
        if len(ready(VARIANTS)) < len(VARIANTS) + len(HELPERS):
            compile_all(budget.left - _FOR_CHECKS - _FOR_MEASUREMENTS, compile_command(kernels))
            keep(VARIANTS)
        return ready(VARIANTS)
    except Exception as error:  # torch's attention is checked all the same
        say(f"FlashInfer's kernels cannot be compiled: {error}")
        return frozenset()


def _reserved(budget: Budget, checks_only: bool) -> Budget:
    """For the checks: what is left but for the measurements."""
    kept = 0.0 if checks_only else _FOR_MEASUREMENTS
    return Budget(max(0.0, budget.seconds - kept), budget.clock, budget.started)


def _measure(
    device: Device,
    backends: Sequence[BackendName],
    kernels: frozenset[Variant | str] | None,
    checks: Sequence[CheckResult],
    budget: Budget,
    about: dict[str, str],
) -> list[Row]:
    if not backends:
        return []
    say(f"measurements after {budget.spent:.0f} s")
    card = measure_card(device)
    about["copy"] = f"{card.copy_gbs:,.0f} GB/s, read and written"
    about["product"] = f"{card.tflops:,.0f} TFLOP/s in bfloat16"
    shape = Shape()
    own = own_layers(shape, device.free_bytes())
    fused = fused_operations(kernels, checks)
    about["model"] = (
        f"random weights in bfloat16, {shape.layers} layers ({own} with weights of their own), "
        f"{shape.weights / 1e9:.2f} billion a step; of FlashInfer's small operations {', '.join(fused) or 'none'}"
    )
    model = RandomDecoder(shape, own, operations_of(fused), device.torch, torch.bfloat16)
    return run_all(list(all_measurements(device, card, model, backends, shares(checks))), budget)


if __name__ == "__main__":
    sys.exit(main())
