"""Who has had how much of the engine lately: tokens, for each tenant and for each owner within it."""

from __future__ import annotations

HALVED_EVERY = 128


class Shares:
    """Accounts of served tokens that halve every 128 steps, so that what lies far back counts no more.

    A level is the account in whole quanta: within one quantum, tenants (or owners) count as served alike. An account
    of s tokens that is served nothing is at level 0 after 128 * (1 + log2(s / quantum)) steps at most. `version`
    changes with any level.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._steps = 0
        self.version = 0
        self._tenants: dict[str, int] = {}
        self._owners: dict[tuple[str, str | None], int] = {}

    def charge(self, tenant: str, owner: str | None, tokens: int) -> None:
        before = self.level(tenant, owner)
        self._tenants[tenant] = self._tenants.get(tenant, 0) + tokens
        self._owners[tenant, owner] = self._owners.get((tenant, owner), 0) + tokens
        self.version += self.level(tenant, owner) != before

    def level(self, tenant: str, owner: str | None) -> tuple[int, int]:
        """Of the tenant, and of the owner among the tenant's."""
        quantum = self._quantum
        return self._tenants.get(tenant, 0) // quantum, self._owners.get((tenant, owner), 0) // quantum

    def step(self) -> None:
        """A step has passed. Accounts that come to nothing are dropped."""
        self._steps += 1
        if self._steps % HALVED_EVERY == 0:
            self._tenants = {key: held // 2 for key, held in self._tenants.items() if held > 1}
            self._owners = {key: held // 2 for key, held in self._owners.items() if held > 1}
            self.version += 1
