"""A step's numbers to a device and back, in memory that copies are still made from."""

from __future__ import annotations

import pytest
import torch

from engine.link import HostLink, StagedLink, link_to
from tests.support import flashinfer_standin
from tests.support.flashinfer_standin import Standin

CPU = torch.device("cpu")


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Standin:
    return flashinfer_standin.install(monkeypatch)


def test_the_link_of_a_device(standin: Standin) -> None:
    assert type(link_to(CPU)) is StagedLink


def test_nothing_is_copied_on_the_cpu() -> None:
    link = link_to(CPU)
    assert type(link) is HostLink
    logits = torch.ones(2, 3)
    assert link.fetch(logits) is logits


@pytest.mark.parametrize("staged", [True, False])
def test_what_is_sent_arrives(staged: bool, standin: Standin) -> None:
    link = StagedLink(standin.transfers, CPU) if staged else HostLink()
    for size in (1, 5, 3, 20_000):
        tokens, positions = list(range(7, 7 + size)), list(range(size))
        inputs = link.send(tokens, positions, positions[-1:])
        assert {x.dtype for x in (inputs.tokens, inputs.positions, inputs.logit_rows)} == {torch.int64}
        found = (inputs.tokens.tolist(), inputs.positions.tolist(), inputs.logit_rows.tolist())
        assert found == (tokens, positions, positions[-1:])
    assert link.send([1], [0], []).logit_rows.shape == (0,)


def test_logits_come_back(standin: Standin) -> None:
    """In the same memory while it suffices."""
    link = StagedLink(standin.transfers, CPU)
    addresses = []
    for rows in (2, 1, 2, 3):
        logits = torch.randn(rows, 10)
        fetched = link.fetch(logits)
        assert torch.equal(fetched, logits)
        assert standin.stream.is_pinned(fetched)
        addresses.append(fetched.data_ptr())
    assert len(set(addresses[:3])) == 1
    assert link.fetch(torch.empty(0, 10)).shape == (0, 10)


def test_memory_is_not_written_before_it_was_read(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that does not wait for its last copy is noticed."""
    link = StagedLink(standin.transfers, CPU)
    link.send([1, 2], [0, 1], [1])
    link.send([3, 4], [0, 1], [1])
    monkeypatch.setattr(flashinfer_standin.stream.StandinFence, "wait", lambda self: None)
    with pytest.raises(AssertionError, match="written while it was being copied from"):
        link.send([5, 6], [0, 1], [1])
