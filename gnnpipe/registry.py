"""Registry: objects by name, with a suggestion for an unknown name.

Datasets, models, partitioners and schedules are selected by the name that a flag gives. Every kind
has one ``Registry``; the objects are registered where they are defined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Generic, TypeVar

from gnnpipe.errors import InputError

T = TypeVar("T")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest known name, or all known names."""
    known = sorted(names)
    close = get_close_matches(name[:64].lower(), [k.lower() for k in known], n=1, cutoff=0.52)
    if close:
        return f"did you mean {next(k for k in known if k.lower() == close[0])!r}?"
    return "known: " + ", ".join(known)


class Registry(Generic[T]):
    """Objects of one kind by name.

    >>> colours = Registry[int]("colour")
    >>> colours.add("red", 1)
    1
    >>> colours["red"]
    1
    """

    def __init__(self, kind: str, field: str = "") -> None:
        """``field``: where names are given, for messages; default: the flag of the kind."""
        self.kind, self.field = kind, field or f"--{kind}"
        self._things: dict[str, T] = {}

    def add(self, name: str, thing: T) -> T:
        """Register ``thing`` under ``name`` and return it; ``ValueError`` for a name in use."""
        if name in self._things:
            raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
        self._things[name] = thing
        return thing

    def __getitem__(self, name: str) -> T:
        try:
            return self._things[name]
        except KeyError:
            hint = nearest(name, self._things)
            raise InputError(f"{self.field} {name!r}: unknown {self.kind}; {hint}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._things))
