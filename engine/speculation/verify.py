"""Which drafts a step keeps.

A step that has drafts gives the model's logits behind the last token and behind each draft:

    tokens    ... t | d1   d2   d3           the model sees all of them at once
    logits        0    1    2    3
    sampled      s0   s1   s2   s3           s1 counts if s0 == d1, s2 if s1 == d2 as well, ...

At each place the token is sampled from the target's own logits, exactly as a step without drafts would sample it: same
penalties, same grammar, and for a request with a temperature the same next number of its generator. A draft is kept if
it is the token that was sampled, and the next place is looked at only then. So what is sampled never depends on the
drafts; these only save steps. The distribution is the target's by construction, and a seed gives the same text whether
drafts are made or not. A token q of a point-mass draft is kept with probability p(q): the best that any exact scheme
can do for drafts without a distribution of their own (Leviathan et al., arXiv 2211.17192, with q(x) = 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from engine.sampling import NoCandidate, Sampled


def verified(
    drafts: Sequence[int], choose: Callable[[int], Sampled | NoCandidate]
) -> Iterator[tuple[Sampled | NoCandidate, bool]]:
    """The outcomes of a step, one at least, each with whether it is the draft at its place.

    choose: samples from the logits of a place, 0 .. len(drafts), and moves the sampling state on. It is called for a
    place only when the one before was kept and the caller asks for more: who ends the text there just stops.
    """
    for place in range(len(drafts) + 1):
        outcome = choose(place)
        kept = place < len(drafts) and isinstance(outcome, Sampled) and outcome.token == drafts[place]
        yield outcome, kept
        if not kept:
            return
