"""Figure: one line of the result, our number beside its peers' and the limit it must keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OURS = "logstore"


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound on a ratio (unit "x") or on the value itself (any other unit)."""

    sign: str
    bound: float
    unit: str = "x"

    def allows(self, number: float) -> bool:
        return number >= self.bound if self.sign == ">=" else number <= self.bound

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g} {self.unit}"


def at_least(bound: float, unit: str = "x") -> Limit:
    return Limit(">=", bound, unit)


def at_most(bound: float, unit: str = "x") -> Limit:
    return Limit("<=", bound, unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """`value` is None when logstore is not installed: then only the peers were measured.

    Without a limit it is shown, and not judged.
    """

    name: str
    value: float | None
    unit: str
    limit: Limit | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    ratio: float | None = None

    @classmethod
    def compared(
        cls,
        name: str,
        rates: Mapping[str, float],
        *,
        against: str,
        limit: Limit,
        unit: str,
        scale: float = 1.0,
        beside: tuple[str, ...] = (),
        ours: str = OURS,
    ) -> Figure:
        """Ours over `against`, from one race; `beside` are peers shown but not judged."""
        shown = {peer: rates[peer] / scale for peer in (against, *beside) if peer in rates}
        if ours not in rates:
            return cls(name=name, value=None, unit=unit, limit=limit, peers=shown)
        ratio = rates[ours] / rates[against]
        value = rates[ours] / scale
        return cls(name=name, value=value, unit=unit, limit=limit, peers=shown, ratio=ratio)

    @property
    def met(self) -> bool | None:
        if self.limit is None:
            return None
        judged = self.ratio if self.limit.unit == "x" else self.value
        return None if judged is None else self.limit.allows(judged)
