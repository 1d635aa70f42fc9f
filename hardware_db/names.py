"""Names that forgive: spelling variants of one hardware name meet in the same key."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from simulator.errors import Problem, UserError, nearest

#: Words that carry no information about which product is meant.
_NOISE = frozenset({"nvidia", "geforce", "tesla", "graphics", "gpu", "generation"})
_WORD = re.compile(r"[a-z0-9.]+")
# SXM2 to SXM6 name the socket's generation, which the GPU's own name already fixes.
_SOCKET = re.compile(r"sxm[2-7]$")
# Words that say which variant, never which product: memory sizes and forms.
_VARIANT = re.compile(r"(\d{1,3}(gb)?|sxm|pcie|nvl|board)$")


def words(name: str) -> tuple[str, ...]:
    """Meaningful lower-case words of ``name``: ``NVIDIA A100-SXM4-80GB`` -> a100, sxm, 80gb."""
    found = (_SOCKET.sub("sxm", word.strip(".")) for word in _WORD.findall(name.lower()))
    return tuple(word for word in found if word and word not in _NOISE)


def keys(name: str) -> tuple[str, str]:
    """The two look-up keys of a name: its words joined, and joined in sorted order."""
    found = words(name)
    return "".join(found), "|".join(sorted(found))


class NameIndex:
    """Finds canonical names from what people write.

    ``spellings`` maps each canonical name to its aliases. An exact match (any spacing, case or
    word order) wins; otherwise a name whose words all occur in exactly one canonical name, so
    that the memory size or the form may be left out where that is unique.
    """

    def __init__(self, spellings: Mapping[str, Iterable[str]]) -> None:
        self._words = {name: frozenset(words(name)) for name in spellings}
        self._exact: dict[str, list[str]] = {}
        for name, aliases in spellings.items():
            for key in {key for text in (name, *aliases) for key in keys(text)}:
                self._exact.setdefault(key, []).append(name)
        self._canonical = {key: name for name in spellings for key in keys(name)}
        self._known = sorted({*spellings, *(a for group in spellings.values() for a in group)})

    def candidates(self, name: str) -> list[str]:
        """Canonical names that ``name`` may mean: one when it is clear, none when unknown."""
        for key in keys(name):
            if key in self._canonical:
                return [self._canonical[key]]
        for key in keys(name):
            if key in self._exact:
                return list(dict.fromkeys(self._exact[key]))
        wanted = words(name)
        if all(_VARIANT.match(word) for word in wanted):
            return []
        return [
            canonical
            for canonical, own in self._words.items()
            if all(word in own or f"{word}gb" in own for word in wanted)
        ]

    def near(self, name: str) -> list[str]:
        """Known spellings that look like ``name``, best first."""
        return nearest("-".join(words(name)) or name, self._known)

    def find(self, name: str, what: str, path: str = "") -> str:
        """The canonical name that ``name`` means.

        Raises:
            UserError: ``name`` is unknown (near ones listed) or means several (all listed).
        """
        found = self.candidates(name)
        if len(found) == 1:
            return found[0]
        if found:
            message = f"{name!r} could be several {what}s"
            hint = "say which: " + ", ".join(sorted(found))
        else:
            close = self.near(name)
            message = f"unknown {what} {name!r}"
            hint = "near ones: " + ", ".join(close) if close else f"`{what}s()` lists all of them"
        raise UserError(Problem(path=path or what, message=message, hint=hint))
