"""The page tables of a step as kernels read them, and how they get to the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention import AttentionRow
from engine.attention.step_tables import StepTables
from engine.attention.transfers import DirectTransfers, Staging

CPU = torch.device("cpu")


def tables(page_size: int, *rows: tuple[list[int], int, int]) -> StepTables:
    """rows: pages, start, count."""
    return StepTables.build(
        [AttentionRow(n, np.array(pages, np.int32), *span, 100) for n, (pages, *span) in enumerate(rows)], page_size
    )


def test_a_decoding_row_beside_a_chunk() -> None:
    """Of the first row's pages the last is not needed yet."""
    step = tables(4, ([7, 5, 9, 2], 9, 1), ([1, 3], 2, 4))
    assert step.token_offsets.tolist() == [0, 1, 5]
    assert step.page_offsets.tolist() == [0, 3, 5]
    assert step.pages.tolist() == [7, 5, 9, 1, 3]
    assert step.last_page_len.tolist() == [2, 2]
    assert step.token_rows.tolist() == [0, 1, 1, 1, 1]
    assert step.positions.tolist() == [9, 2, 3, 4, 5]
    assert step.key_offsets.tolist() == [0, 10, 16]
    assert step.token_slots(4).tolist() == [37, 6, 7, 12, 13]
    assert step.key_slots(4).tolist() == [28, 29, 30, 31, 20, 21, 22, 23, 36, 37, 4, 5, 6, 7, 12, 13]
    assert step.block_table().reshape(2, 3).tolist() == [[7, 5, 9], [1, 3, 3]]
    assert not step.single
    assert all(getattr(step, name).dtype == np.int32 for name in StepTables.__slots__)


@pytest.mark.parametrize(
    ("start", "count", "last", "fresh"),
    [
        (0, 1, 1, [0]),  # the first slot of the first page
        (1, 1, 2, []),  # a page that an earlier step began, and cleared
        (3, 1, 4, []),  # filled to the end
        (4, 1, 1, [1]),
        (0, 4, 4, []),
        (0, 8, 4, []),
        (2, 7, 1, [2]),  # those between are filled
        (4, 3, 3, [1]),
        (5, 2, 3, []),
    ],
)
def test_pages_that_are_begun_and_not_filled(start: int, count: int, last: int, fresh: list[int]) -> None:
    step = tables(4, ([0, 1, 2], start, count))
    assert step.last_page_len.tolist() == [last]
    assert step.fresh.tolist() == fresh
    assert step.single == (count == 1)


def test_pages_of_one_token_are_never_begun_alone() -> None:
    step = tables(1, ([4, 2, 0], 0, 3), ([5], 0, 1))
    assert step.last_page_len.tolist() == [1, 1]
    assert step.fresh.tolist() == []
    assert step.key_slots(1).tolist() == [4, 2, 0, 5]


def test_a_step_that_is_larger_than_the_staging_memory() -> None:
    staging = Staging(DirectTransfers(), CPU, size=8)
    for size in (3, 100, 5):
        arrays = [np.arange(size, dtype=np.int32), np.empty(0, np.int32), np.full(size, size, np.int32)]
        with torch.inference_mode(size == 100), staging.step(arrays) as staged:
            for array, one in zip(arrays, staged, strict=True):
                assert one.host.tolist() == one.device.tolist() == array.tolist()


def test_a_step_that_fails_leaves_its_fence() -> None:
    class Counting(DirectTransfers):
        fences = 0

        def fence(self) -> object:
            self.fences += 1
            return super().fence()

    transfers = Counting()
    staging = Staging(transfers, CPU)
    with pytest.raises(KeyError), staging.step([np.zeros(1, np.int32)]):
        raise KeyError
    assert transfers.fences == 1
