"""Exceptions raised for a configuration that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence


def listing(headline: str, lines: Sequence[str], what: str) -> str:
    """A headline with one line behind it, or with the number of `what` and all lines below it."""
    if len(lines) == 1:
        return f"{headline}: {lines[0]}"
    return "\n  ".join([f"{headline}, {len(lines)} {what}:", *lines])


class ConfigError(ValueError):
    """A configuration is malformed, out of bounds or contradicts itself.

    `problems` holds one line per problem, each starting with the path of the key it is about.
    """

    headline = "the configuration cannot be used"

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(self._text())

    def _text(self) -> str:
        return listing(self.headline, self.problems, "problems")


class UnsupportedConfigError(ConfigError):
    """A valid configuration asks for features that this version does not have."""

    headline = "the configuration asks for what is not in this version"
