"""What a turn will write and ask, complete before anything is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.api import GenerateRequest
from engine.text.api import Encoded
from sessions.content import check_client_msg_id, check_content, check_text
from sessions.params import check_params
from sessions.records import ContextCut, Turn


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A checked wish for a turn. parent_id None continues the session's active leaf."""

    content: str
    parent_id: str | None
    client_msg_id: str | None
    params: Mapping[str, Any]

    @classmethod
    def checked(
        cls, content: str, parent_id: str | None, client_msg_id: str | None, params: Mapping[str, Any] | None
    ) -> TurnRequest:
        """Raises InvalidInput."""
        return cls(
            content=check_content("content", content),
            parent_id=None if parent_id is None else check_text("parent_id", parent_id),
            client_msg_id=None if client_msg_id is None else check_client_msg_id(client_msg_id),
            params=check_params(params),
        )

    @property
    def digest(self) -> str:
        """Equal for equal bodies; what a repeated client_msg_id is compared by."""
        body = json.dumps([self.content, self.parent_id, dict(self.params)], sort_keys=True)
        return hashlib.sha256(body.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """leaf: the active leaf that the prompt continues by default; None when the client chose the parent.

    encoded: ids to store, by message id; cut: set when the context was trimmed just now.
    """

    asked: TurnRequest
    owner: str
    turn: Turn
    leaf: str | None
    request: GenerateRequest
    encoded: Mapping[str, Encoded] = field(default_factory=dict)
    system_encoded: Encoded | None = None
    cut: ContextCut | None = None
