"""`Tenants`: who has been served how much, so that those who wait can share by weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Counters of tenants that have nothing to do are kept while they are ahead of the others, and of so many at most.
_MOST_IDLE = 1024


@dataclass(frozen=True, slots=True)
class Price:
    """What work counts for. Any unit; by default a token counts 1, wherever it stands.

    `row`: a token of a prompt through the layers. `pair`: a query against one position before it. `decode`: a generated
    token, which reads weights for few rows.
    """

    row: float = 1.0
    pair: float = 0.0
    decode: float = 1.0

    def of(self, start: int, rows: int) -> float:
        """Of positions `[start, start + rows)` of a prompt."""
        return rows * (self.row + self.pair * (start + 0.5 * (rows + 1)))


class Tenant:
    """One that has unfinished requests, or had. `service`: what it got, by its weight."""

    __slots__ = ("name", "prices", "requests", "service", "weight")

    def __init__(self, name: str, weight: float, prices: Price) -> None:
        self.name = name
        self.weight = weight
        self.prices = prices
        self.service = 0.0
        self.requests = 0  # unfinished

    def price(self, start: int, rows: int) -> float:
        """What the service of so many rows adds."""
        return self.prices.of(start, rows) / self.weight

    def charge(self, start: int, rows: int, *, decode: bool) -> None:
        """Counts what a step computes for it."""
        self.service += (self.prices.decode + self.prices.pair * start if decode else self.prices.of(start, rows)) / (
            self.weight
        )


class Tenants:
    """Virtual token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024), by cost.

    Whoever comes back after a pause begins at the counter of the least served of those that have work: nobody saves up
    service. When nobody has work, all is forgotten: nobody was kept waiting. Names are any; few are kept.
    """

    __slots__ = ("_known", "_weights", "price")

    def __init__(self, weights: Mapping[str, float] | None = None, price: Price | None = None) -> None:
        """`weights`: by name; everybody else has 1.0."""
        self.price = price or Price()
        self._weights = dict(weights or {})
        self._known: dict[str, Tenant] = {}

    def join(self, name: str) -> Tenant:
        """The tenant, with one unfinished request more. Cost: O(tenants) for the first request of one."""
        tenant = self._known.get(name)
        if tenant is None:
            tenant = self._known[name] = Tenant(name, self._weights.get(name, 1.0), self.price)
        if not tenant.requests:
            tenant.service = max(tenant.service, self._floor())
        tenant.requests += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """One request of it has ended."""
        tenant.requests -= 1
        if tenant.requests:
            return
        if not any(other.requests for other in self._known.values()):
            self._known.clear()
        elif len(self._known) > _MOST_IDLE:
            floor = self._floor()
            idle = [other for other in self._known.values() if not other.requests]
            for other in idle:
                if other.service <= floor or len(self._known) > 2 * _MOST_IDLE:
                    del self._known[other.name]

    def _floor(self) -> float:
        return min((tenant.service for tenant in self._known.values() if tenant.requests), default=0.0)
