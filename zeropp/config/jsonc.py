"""JSON as people write it: with comments and trailing commas, without doubled keys."""

from __future__ import annotations

import json
import re

from zeropp.config.errors import ConfigError
from zeropp.config.foreign import is_comment

# A string is one token, so that nothing inside it counts as a comment or a comma. The alternatives are tried
# in this order at each position.
_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<comment>//[^\n]*|\#[^\n]*|/\*.*?\*/)
      | (?P<open>/\*)
      | (?P<close>[}\]])
      | (?P<space>\s+)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


def parse(text: str, origin: str) -> object:
    """Reads JSON with `//`, `#` and `/* */` comments and commas before a closing bracket.

    `origin` says where the text is from, for the error message. Raises ConfigError with line and column where
    the text is no JSON, and where an object has a key twice.
    """
    try:
        return json.loads(_plain(text, origin), object_pairs_hook=lambda pairs: _unique(pairs, origin))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{origin}: line {error.lineno}, column {error.colno}: {error.msg}; expected JSON, "
            "in which comments and trailing commas are allowed"
        ) from None


def _plain(text: str, origin: str) -> str:
    """Blanks out comments and trailing commas, leaving every other character at its line and column."""
    out: list[str] = []
    # The last token that counts: comments and spaces do not.
    before = ""
    # Where in ``out`` the last token is, if it is a comma that follows a value.
    comma = -1
    for match in _TOKEN.finditer(text):
        kind, token = match.lastgroup, match.group()
        # A comment that ends matches before, so this one does not.
        if kind == "open":
            line = text.count("\n", 0, match.start()) + 1
            raise ConfigError(f"{origin}: line {line}: this comment has no end; close it with */")
        if kind == "close" and comma >= 0:
            out[comma] = " "
        if kind not in ("comment", "space"):
            # In [,] and {"a": ,} the comma follows no value, and stays for json to refuse.
            comma = len(out) if token == "," and before not in ("", ",", ":", "[", "{") else -1
            before = token
        # Newlines stay, so that json's errors have the line of the file.
        out.append(re.sub(r"[^\n]", " ", token) if kind == "comment" else token)
    return "".join(out)


def _unique(pairs: list[tuple[str, object]], origin: str) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        # json itself would take the last one, silently. A second comment is no contradiction.
        if key in result and not is_comment(key):
            raise ConfigError(f"{origin}: the key {key!r} is given twice, as {result[key]!r} and {value!r}; keep one")
        result[key] = value
    return result
