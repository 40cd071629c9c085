"""Compiles what simd.py writes, for this processor, and keeps the machine code: a second start only reads it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from engine.kernels.processor import Processor

log = logging.getLogger(__name__)
_CHECKSUM = hashlib.sha256().digest_size
_KEPT_S = 180 * 24 * 3600.0


class Compiled:
    """Machine code in memory, for as long as this object lives."""

    def __init__(self, code: bytes, machine: llvm.TargetMachine) -> None:
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self._addresses: dict[str, int] = {}

    def address(self, name: str) -> int:
        if (address := self._addresses.get(name)) is None:
            address = self._addresses[name] = self._engine.get_function_address(name)
            if address == 0:
                raise KeyError(name)
        return address


def compiled(what: str, write: Callable[[ir.Module], None], processor: Processor, folder: Path) -> Compiled:
    """The functions that `write` adds to a module. what: says which, and with which parameters.

    folder: where machine code is kept, by `what`, the processor, and the sources of this package, if it can be. What is
    damaged there is made again.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=processor.cpu, features=processor.features, opt=3, jit=True, codemodel="jitdefault"
    )
    path = folder / f"{_digest(what, processor)}.o"
    if (code := _kept(path)) is None:
        code = _machine_code(write, machine)
        _keep(code, path)
    return Compiled(code, machine)


def _machine_code(write: Callable[[ir.Module], None], machine: llvm.TargetMachine) -> bytes:
    module = ir.Module()
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    write(module)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    code: bytes = machine.emit_object(parsed)
    return code


def _digest(what: str, processor: Processor) -> str:
    digest = hashlib.sha256(repr((what, processor, llvmlite.__version__)).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _kept(path: Path) -> bytes | None:
    """The code as it was written, or None: LLVM does not survive anything else."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, code = content[:_CHECKSUM], content[_CHECKSUM:]
    return code if hashlib.sha256(code).digest() == checksum else None


def _keep(code: bytes, path: Path) -> None:
    """Behind its checksum; whole or not at all: another process may read it meanwhile. What nobody has made anew for
    long goes: code of former versions, above all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for other in path.parent.glob("*.o"):
            if other.stat().st_mtime < time() - _KEPT_S:
                other.unlink(missing_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=".kernel-") as folder:
            whole = Path(folder) / path.name
            whole.write_bytes(hashlib.sha256(code).digest() + code)
            whole.replace(path)
    except OSError as error:
        _warn(path.parent, error.strerror or str(error))


@cache
def _warn(folder: Path, reason: str) -> None:
    """Once, and not for each module."""
    log.warning("machine code cannot be kept in %s, so every start compiles it anew: %s", folder, reason)
