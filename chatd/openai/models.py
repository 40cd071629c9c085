"""What /v1 calls a model: the model that is served, and each adapter of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chatd.errors import ModelNotFound
from chatd.settings import ANY_MODEL, Settings


@dataclass(frozen=True, slots=True)
class ServedModels:
    base: str
    adapters: tuple[str, ...]

    @classmethod
    def of(cls, settings: Settings) -> ServedModels:
        return cls(settings.model_name, tuple(adapter.name for adapter in settings.adapter))

    def find(self, asked: str) -> tuple[str, str | None]:
        """The name to answer with, and the adapter to use. Raises ModelNotFound."""
        if asked in (self.base, ANY_MODEL):
            return self.base, None
        if asked in self.adapters:
            return asked, asked
        raise ModelNotFound(self.base, self.adapters)

    def shown(self, asked: str, created: int) -> dict[str, Any]:
        """One of `listed`. Raises ModelNotFound."""
        name, _ = self.find(asked)
        return next(model for model in self.listed(created) if model["id"] == name)

    def listed(self, created: int) -> list[dict[str, Any]]:
        """As GET /v1/models tells them. created: seconds since 1970."""
        common = {"object": "model", "created": created, "owned_by": "chatd"}
        adapters = [{"id": name, **common, "parent": self.base} for name in self.adapters]
        return [{"id": self.base, **common}, *adapters]
