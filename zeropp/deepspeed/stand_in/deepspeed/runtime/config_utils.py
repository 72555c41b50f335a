"""What DeepSpeed derives its configuration's blocks from, and other projects theirs."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = ["DeepSpeedConfigModel"]


class DeepSpeedConfigModel(BaseModel):
    """A block: keys by name or alias, unknown ones are errors, and "auto" stands for a default.

    A field whose ``json_schema_extra`` has ``deprecated`` names in ``new_param`` the one that takes its value, which
    ``new_param_fn`` converts.

    Raises:
        AssertionError: a deprecated key and its new one are both given.
        pydantic.ValidationError: other values than fields are for.
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
        # With ``strict``, "auto" is a value like others, for blocks that know it.
        given = data if strict else {key: value for key, value in data.items() if value != "auto"}
        # Here and not in a validator: pydantic would make another error of an AssertionError.
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
