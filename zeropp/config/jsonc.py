"""JSON as people write it: with comments and trailing commas, without doubled keys."""

from __future__ import annotations

import json
import re

from zeropp.config.errors import ConfigError
from zeropp.config.foreign import is_comment

_STRING = r'("(?:[^"\\\n]|\\.)*")'
_COMMENT = re.compile(_STRING + r"|//[^\n]*|\#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(_STRING + r"|(?<![\[{,:\s])(\s*),(?=\s*[}\]])")


def parse(text: str, origin: str) -> object:
    """Reads JSON with `//`, `#` and `/* */` comments and commas before a closing bracket.

    `origin` says where the text is from, for the error message. Raises ConfigError with line and column where
    the text is no JSON, and where an object has a key twice.
    """
    # Strings match first, so nothing inside them counts. Blanks keep every other character at its line and column.
    plain = _COMMENT.sub(lambda found: found[1] or re.sub(r"[^\n]", " ", found[0]), text)
    plain = _TRAILING_COMMA.sub(lambda found: found[1] or f"{found[2]} ", plain)
    try:
        return json.loads(plain, object_pairs_hook=lambda pairs: _unique(pairs, origin))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{origin}: line {error.lineno}, column {error.colno}: {error.msg}; expected JSON, "
            "in which comments and trailing commas are allowed"
        ) from None


def _unique(pairs: list[tuple[str, object]], origin: str) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        # json itself would take the last one, silently. A second comment is no contradiction.
        if key in result and not is_comment(key):
            raise ConfigError(f"{origin}: the key {key!r} is given twice, as {result[key]!r} and {value!r}; keep one")
        result[key] = value
    return result
