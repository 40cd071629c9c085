"""A step's numbers to a device and back, in memory that copies are still made from and to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.link import HostLink, StagedLink, link_to, send_inputs
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
    assert link.fetch([logits]).wait()[0] is logits


@pytest.mark.parametrize("staged", [True, False])
def test_what_is_sent_arrives(staged: bool, standin: Standin) -> None:
    link = StagedLink(standin.transfers, CPU) if staged else HostLink()
    for size in (1, 5, 3, 20_000):
        tokens, positions = list(range(7, 7 + size)), list(range(size))
        inputs = send_inputs(link, tokens, positions, positions[-1:])
        assert {x.dtype for x in (inputs.tokens, inputs.positions, inputs.logit_rows)} == {torch.int64}
        found = (inputs.tokens.tolist(), inputs.positions.tolist(), inputs.logit_rows.tolist())
        assert found == (tokens, positions, positions[-1:])
    assert send_inputs(link, [1], [0], []).logit_rows.shape == (0,)


def test_results_come_back(standin: Standin) -> None:
    """In the same two pieces of memory while they suffice."""
    link = StagedLink(standin.transfers, CPU)
    addresses = []
    for rows in (2, 1, 2, 0, 3):
        tokens, logits = torch.arange(rows, dtype=torch.int32), torch.randn(rows, 10)
        fetched = link.fetch([tokens, logits]).wait()
        assert torch.equal(fetched[0], tokens)
        assert torch.equal(fetched[1], logits)
        if rows:
            assert all(standin.stream.is_pinned(result) for result in fetched)
            addresses.append(fetched[0].data_ptr())
    assert addresses[0] == addresses[2] != addresses[1] != addresses[3]


def test_results_are_good_until_the_second_fetch_after(standin: Standin) -> None:
    link = StagedLink(standin.transfers, CPU)
    first = link.fetch([torch.tensor([1, 2], dtype=torch.int32)])
    second = link.fetch([torch.tensor([3, 4], dtype=torch.int32)])
    assert first.wait()[0].tolist() == [1, 2]
    third = link.fetch([torch.tensor([5, 6], dtype=torch.int32)])
    assert second.wait()[0].tolist() == [3, 4]
    assert third.wait()[0].tolist() == [5, 6]


def test_results_are_not_there_before_they_were_waited_for(standin: Standin) -> None:
    """The stand-in writes them as late as a card may."""
    link = StagedLink(standin.transfers, CPU)
    arrival = link.fetch([torch.tensor([1.0, 2.0])])
    assert isinstance(arrival.results[0], torch.Tensor)  # type: ignore[attr-defined]
    assert arrival.results[0].isnan().all()  # type: ignore[attr-defined]
    assert arrival.wait()[0].tolist() == [1.0, 2.0]


def test_memory_is_not_written_before_it_was_read(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that does not wait for its last copy is noticed."""
    link = StagedLink(standin.transfers, CPU)

    def send(*numbers: int) -> None:
        link.send([np.array(numbers, dtype=np.int32)])

    send(1, 2)
    send(3, 4)
    monkeypatch.setattr(flashinfer_standin.stream.StandinFence, "wait", lambda self: None)
    with pytest.raises(AssertionError, match="written while it was being copied from"):
        send(5, 6)
