"""``DeepSpeedConfigModel``: base class of DeepSpeed's configuration blocks, which other projects subclass."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = ["DeepSpeedConfigModel"]


class DeepSpeedConfigModel(BaseModel):
    """Base class of configuration blocks. Unknown keys raise, and the value "auto" means the default.

    Keys are field names or aliases. A deprecated field has ``json_schema_extra`` with ``deprecated=True`` and
    ``new_param``, the name of the field that gets its value. ``new_param_fn`` converts the value.

    Args:
        strict: True to pass "auto" to the fields as a value, for blocks that define a meaning for it.
        data: the keys and values of the block.

    Raises:
        AssertionError: a deprecated key and its new key are both given.
        pydantic.ValidationError: a key is unknown, or a value does not fit its field.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        # Drop "auto" so that the field's default applies.
        given = data if strict else {key: value for key, value in data.items() if value != "auto"}
        # In __init__ and not in a validator, because pydantic would turn an AssertionError into a ValidationError.
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if name in given and isinstance(extra, dict) and extra.get("deprecated") and extra.get("new_param"):
                self._replace(given, name, extra)
        super().__init__(**given)

    @staticmethod
    def _replace(given: dict[str, Any], old: str, extra: dict[str, Any]) -> None:
        new = extra["new_param"]
        if new in given:
            raise AssertionError(f"{old} is deprecated for {new}, and both are given; keep {new}")
        convert = extra.get("new_param_fn") or (lambda value: value)
        given[new] = convert(given.pop(old))
