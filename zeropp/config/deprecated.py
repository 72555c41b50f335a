"""Keys of the zero block that have newer forms."""

from __future__ import annotations

from collections.abc import Mapping

from zeropp.config.base import AUTO, is_auto, notify_once

REPLACEMENTS: Mapping[str, str] = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_use_pin_memory": "pin_memory in offload_optimizer and offload_param",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
_RENAMED = ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save")
_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


def upgrade_zero(given: dict[str, object]) -> dict[str, object]:
    """Rewrites the deprecated keys of a zero block, with one warning for each that is present.

    Raises ValueError where an old key and the one that took its place are both given.
    """
    # Taken out first, used last: it goes into blocks that other old keys may have yet to make.
    pin = _taken(given, "cpu_offload_use_pin_memory")
    for old, new in _OFFLOAD.items():
        wanted = _taken(given, old, new)
        if wanted is not None:
            given[new] = {"device": "cpu"} if wanted else None
    gather = _taken(given, "stage3_gather_fp16_weights_on_model_save", *_RENAMED)
    if gather is not None:
        given[_RENAMED[0]] = gather
    if pin is not None:
        for block in _OFFLOAD.values():
            # Pinning without offload pins nothing.
            if given.get(block) is not None:
                given[block] = _pinned(block, given[block], pin)
    return given


def _taken(given: dict[str, object], old: str, *new: str) -> bool | None:
    """Removes a deprecated key and returns its value; None where it is absent or "auto"."""
    if old not in given:
        return None
    value = given.pop(old)
    clash = [key for key in new if key in given]
    if clash:
        raise ValueError(f"{old} is the old form of {clash[0]} and both are given; keep only {clash[0]}")
    if not isinstance(value, bool) and not is_auto(value):
        raise ValueError(f"{old}: got {value!r}, expected a boolean; set {REPLACEMENTS[old]} instead")
    # FutureWarning, since Python hides DeprecationWarning outside of __main__.
    notify_once(f"zero_optimization.{old} is deprecated; set {REPLACEMENTS[old]} instead", FutureWarning)
    return value if isinstance(value, bool) else None


def _pinned(name: str, block: object, pin: bool) -> dict[str, object]:
    if not isinstance(block, Mapping) or block.get("pin_memory", AUTO) != AUTO:
        raise ValueError(
            f"cpu_offload_use_pin_memory is the old form of {name}.pin_memory and both are given; "
            f"keep only {name}.pin_memory"
        )
    return {**block, "pin_memory": pin}
