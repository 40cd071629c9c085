"""A file of tensors that is mapped, not read: each one starts where vector instructions want it.

    weights.bin     the tensors' bytes, each from a multiple of 64 on
    weights.json    name -> dtype, shape, offset in bytes

safetensors packs tensors closely; here none shares a cache line with another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

ALIGNMENT = 64


def save_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    index: dict[str, dict[str, object]] = {}
    with (folder / "weights.bin").open("wb") as file:
        for name, tensor in tensors.items():
            file.write(bytes(-file.tell() % ALIGNMENT))
            dtype = str(tensor.dtype).removeprefix("torch.")
            index[name] = {"dtype": dtype, "shape": list(tensor.shape), "offset": file.tell()}
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    (folder / "weights.json").write_text(json.dumps(index), encoding="utf-8")


def map_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read-only in intent. Files that `save_tensors` has not written raise OSError or any of Python's own errors."""
    path = folder / "weights.bin"
    index = json.loads((folder / "weights.json").read_text(encoding="utf-8"))
    mapped = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    tensors = {}
    for name, entry in index.items():
        dtype, shape, start = getattr(torch, entry["dtype"]), entry["shape"], entry["offset"]
        count = torch.Size(shape).numel()
        tensors[name] = mapped[start : start + count * dtype.itemsize].view(dtype).view(shape)
    return tensors
