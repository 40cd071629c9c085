"""Buffers that steps of single tokens keep, so that a captured CUDA graph reads what the newest plan wrote."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class FixedDecode:
    """Steps of single tokens that keep their buffers from step to step.

    batches: numbers of rows. most_pages: the most page numbers that all rows of a step may have together, a page that
    several of them share counted for each; a step with more is planned without fixed buffers.
    """

    batches: tuple[int, ...]
    most_pages: int


@dataclass(frozen=True, slots=True)
class DecodeForm:
    """Steps of one form run the same kernels over the same buffers: a graph of one serves all.

    shared: pages that several rows begin with are read once for them.
    """

    rows: int
    shared: bool = False

    def __str__(self) -> str:
        return f"{self.rows} sequences at a time{', what they share once' if self.shared else ''}"


@dataclass(frozen=True, slots=True)
class Places:
    """Where new keys and values go: int32 on the device, as append_paged_kv_cache wants them (see StepTables)."""

    token_rows: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    page_offsets: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(frozen=True, slots=True)
class SharedPlaces:
    """Int32 on the device, see SharedTables."""

    query_offsets: torch.Tensor
    page_offsets: torch.Tensor
    pages: torch.Tensor
    last_page_len: torch.Tensor
    order: torch.Tensor
    inverse: torch.Tensor


def places_for(fixed: FixedDecode, device: torch.device) -> dict[int, Places]:
    """By the number of rows. All share the page numbers: `plan` writes them anew."""
    pages = _zeros(fixed.most_pages, device)
    return {
        rows: Places(
            torch.arange(rows, dtype=torch.int32, device=device),
            _zeros(rows, device),
            pages,
            _zeros(rows + 1, device),
            _zeros(rows, device),
        )
        for rows in fixed.batches
    }


def shared_places_for(fixed: FixedDecode, requests: dict[int, int], device: torch.device) -> dict[int, SharedPlaces]:
    """By the number of rows. requests: how many there are of so many rows."""
    pages = _zeros(fixed.most_pages, device)
    return {
        rows: SharedPlaces(
            _zeros(count + 1, device),
            _zeros(count + 1, device),
            pages,
            _zeros(count, device),
            _zeros(rows, device),
            _zeros(rows, device),
        )
        for rows, count in requests.items()
    }


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)
