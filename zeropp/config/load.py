"""From what users pass as a configuration to a `Config`."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from zeropp.config.auto import warn_of_choices
from zeropp.config.base import spellings
from zeropp.config.describe import value_text
from zeropp.config.errors import ConfigError
from zeropp.config.explain import problems
from zeropp.config.foreign import FOREIGN, without_comments
from zeropp.config.ineffective import warn_without_effect
from zeropp.config.jsonc import parse
from zeropp.config.top import Config

ConfigSource = Config | Mapping[str, Any] | str | os.PathLike[str] | None


def load_config(source: ConfigSource = None, *, final: bool = True) -> Config:
    """Reads and checks a configuration.

    `source` is a mapping, the path of a JSON file (comments and trailing commas are allowed), a JSON object
    in url-safe base64, a `Config`, which is returned as it is, or None, which is stage 3 with all other
    defaults. The source is not changed. With `final` false nothing is said of values at "auto" and of keys without
    effect: a trainer goes on to fill them in, and gives the configuration again.

    Raises ConfigError listing every problem found. Whether this version has what is asked for is a separate
    question, which `require_supported` answers.
    """
    # Checked when it was made.
    if isinstance(source, Config):
        return source
    given = {"zero_optimization": {"stage": 3}} if source is None else _read(source)
    if not isinstance(given, Mapping):
        # Base64 has no name, and may be long.
        name = source if isinstance(source, str | os.PathLike) and os.path.exists(source) else _shortened(str(source))
        raise ConfigError(f"{name}: got {value_text(given):.80}; expected a JSON object at the top level")
    given, ignored = _without_ignored(without_comments(given))
    try:
        config = Config.model_validate(given)
    except ValidationError as error:
        # Without pydantic's own error, which repeats all of it in other words.
        raise ConfigError(problems(error, Config, given)) from None
    named = isinstance(source, str | os.PathLike) and os.path.exists(source)
    name = str(source) if named else "the configuration"
    if final:
        warn_of_choices(given, config, name)
        warn_without_effect(given, config, ignored, name)
    return config


def _read(source: object) -> object:
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"got {type(source).__name__} {source!r:.80}; expected a dict, a path, base64 of JSON, or None"
        )
    path = os.fspath(source)
    # A path object is meant as a path, also where nothing is there.
    if isinstance(source, str) and not os.path.exists(path):
        return parse(_decoded(source), "base64 configuration")
    try:
        # Some editors put a byte order mark in front, which json refuses.
        with open(path, encoding="utf-8-sig") as file:
            return parse(file.read(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected the path of a JSON file in UTF-8") from None


def _without_ignored(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration without the keys that DeepSpeed does not read, either, and those keys.

    They are keys of other programs, and such as ``"block.key"``: TRL writes these beside the block, and its 0.9 h^2
    elements may be no whole number.
    """
    blocks = {key for name, field in Config.model_fields.items() for key in spellings(name, field)}
    dotted = {key for key in given if isinstance(key, str) and "." in key and key.partition(".")[0] in blocks}
    ignored = {key: value for key, value in given.items() if key in dotted or key in FOREIGN}
    return {key: value for key, value in given.items() if key not in ignored}, ignored


def _decoded(text: str) -> str:
    """The text behind url-safe base64, with or without its padding."""
    try:
        # Padding may have been stripped. Without validate, foreign characters would be skipped, and many paths would
        # pass for base64.
        decoded = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode("utf-8")
    except ValueError:
        decoded = ""
    # Short names are often valid base64 of something; only an object can have been meant as a configuration.
    if not decoded.lstrip().startswith("{"):
        raise ConfigError(
            f"{_shortened(text)!r} is neither the path of an existing file nor base64 of a JSON object; "
            "check the path, or pass JSON text as json.loads(text)"
        )
    return decoded


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
