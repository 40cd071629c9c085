"""What a policy gives back."""

from __future__ import annotations

from dataclasses import dataclass

from sessions.records import ContextCut
from sessions.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Fitted:
    """A transcript within its budget; `cut` is set when something was dropped just now."""

    transcript: Transcript
    cut: ContextCut | None
