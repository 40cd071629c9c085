"""What can go wrong between text and ids."""

from __future__ import annotations

from engine.errors import RequestError


class TemplateError(RequestError):
    """The model's chat template refuses this conversation; the message is the template's own."""
