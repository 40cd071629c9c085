"""The policies by name: what a session does when its context is full."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.text.api import ChatCodec
from sessions.context.budget import Budget
from sessions.context.fitted import Fitted
from sessions.context.window import fit_window
from sessions.errors import ContextOverflow
from sessions.transcript import Conversation, render

Policy = Callable[[ChatCodec, Conversation, Budget], Fitted]


def fit_error(codec: ChatCodec, conversation: Conversation, budget: Budget) -> Fitted:
    """Never trims: raises ContextOverflow instead."""
    transcript = render(codec, conversation)
    if transcript.tokens > budget.tokens:
        raise ContextOverflow(transcript.tokens, budget.reserve, budget.limit)
    return Fitted(transcript, None)


POLICIES: Mapping[str, Policy] = {"window": fit_window, "error": fit_error}


def fit(policy: str, codec: ChatCodec, conversation: Conversation, budget: Budget) -> Fitted:
    """The conversation as the policy lets the model see it.

    Raises ContextOverflow with the numbers when even the least that the policy keeps does not fit.
    """
    return POLICIES[policy](codec, conversation, budget)
