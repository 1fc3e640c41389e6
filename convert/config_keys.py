"""Look-ups in JSON configurations whose errors name the file and the key."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, NoReturn

from tfm_jax.errors import TfmError

Json = Mapping[str, Any]


class Neutral(NamedTuple):
    """Values of a key that leave the mathematics as we compute them, and why others do not.

    An absent or null key is always neutral.
    """

    values: tuple[Any, ...]
    reason: str = ""


class Watched(dict[str, Any]):
    """A JSON object that notes which names are looked up in it and in the objects inside, wherever they lie."""

    _DEPTH = 4  # of objects in objects; what lies deeper is of no interest

    def __init__(self, values: Json, seen: set[str] | None = None, depth: int = _DEPTH) -> None:
        self.seen = set() if seen is None else seen
        nested = {k: Watched(v, self.seen, depth - 1) for k, v in values.items() if isinstance(v, dict) and depth}
        super().__init__({**values, **nested})

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401  (a JSON value)
        """As of a dict."""
        self.seen.add(key)
        return super().get(key, default)

    def unseen(self, known: Collection[str]) -> list[str]:
        """Dotted names with a value that nobody looked up and that are not known either."""
        names = []
        for key, value in self.items():
            if value is not None and key not in known:
                if key not in self.seen:
                    names.append(key)
                elif isinstance(value, Watched):
                    names += [f"{key}.{name}" for name in value.unseen(known)]
        return names


class Keys:
    """Look-ups in several JSON objects, the first one first; every error names the file and the key."""

    def __init__(self, place: str, *objects: Json) -> None:
        self.place = place
        self._objects = objects

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401  (a JSON value)
        """The first value that is not null."""
        return next((values[key] for values in self._objects if values.get(key) is not None), default)

    def integer(self, key: str, *, least: int = 1, most: int = 1 << 31, default: int | None = None) -> int:
        """A whole number within bounds."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.refuse(key, f"must be a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None, *, most: float = sys.float_info.max) -> float:
        """A positive number up to `most`."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:
            bound = "" if most == sys.float_info.max else f" up to {most:g}"
            self.refuse(key, f"must be a positive number{bound}")
        return float(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self.get(key)
        if not isinstance(value, list) or any(not isinstance(v, int) or isinstance(v, bool) for v in value):
            self.refuse(key, "must be a list of whole numbers")
        return tuple(value)

    def words(self, key: str) -> list[str]:
        """A list of strings, empty where absent."""
        value = self.get(key, [])
        if not isinstance(value, list) or any(not isinstance(word, str) for word in value):
            self.refuse(key, "must be a list of strings")
        return value

    def choices(self, key: str, default: list[str], allowed: Collection[str]) -> list[str]:
        """One allowed word per layer; as many as `default` has."""
        value = self.get(key, default)
        if not isinstance(value, list) or len(value) != len(default) or any(word not in allowed for word in value):
            self.refuse(key, f"must say {' or '.join(allowed)} for each of {len(default)} layers")
        return value

    def nested(self, key: str) -> Json:
        """An object, empty where absent."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            self.refuse(key, "must be an object")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "must be true or false")
        return value

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Raise the error that names the file, the key, its value and the reason."""
        value = self.get(key)
        found = "absent" if value is None else repr(value)[:80]
        message = f"{self.place}: {key} is {found} but {reason}."
        raise TfmError(message)

    def check_neutral(self, table: Mapping[str, Neutral]) -> None:
        """Raise if a key of the table has a value that changes the mathematics."""
        for key, (allowed, reason) in table.items():
            value = self.get(key)
            if value is not None and value not in allowed:
                words = " or ".join(repr(choice) for choice in allowed) or "its absence"
                self.refuse(key, f"only {words} is supported yet" + (f": {reason}" if reason else ""))
