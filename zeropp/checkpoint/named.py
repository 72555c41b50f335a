"""Files of others that name their tensors: which are the model's, and which its optimizer's states and settings.

Plain torch and torch.distributed.checkpoint nest dicts and lists in different ways. Here both are a flat dict of paths,
as torch itself writes them with dots between.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from zeropp.checkpoint.checksums import STRETCH
from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.metadata import FORMAT, BoxEntry, FileEntry, Metadata, TensorEntry
from zeropp.checkpoint.parts import MODEL, STATE
from zeropp.checkpoint.source import Source
from zeropp.checkpoint.values import encode
from zeropp.config.base import notify
from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = ["Found", "Later", "Named", "metadata_of", "named_source"]

# What the model that is trained is kept under, and wrappers around it.
_USUAL = frozenset({"model", "state_dict", "model_state_dict", "module", "_orig_mod"})


@dataclass(frozen=True)
class Later:
    """A value that lies in a file of its own and is read when it is wanted."""

    read: Callable[[], object]


@dataclass
class Found:
    """The contents of files.

    Attributes:
        place: of them, for errors.
        folder: that they are in.
        files: with their sizes.
        entries: tensors, values, and values that are read later, by path.
        locate: as in :class:`~zeropp.checkpoint.source.Source`.
    """

    place: Path
    folder: Path
    files: list[FileEntry] = field(default_factory=list)
    entries: dict[tuple[str, ...], Any] = field(default_factory=dict)
    locate: Callable[[BoxEntry], BoxEntry] | None = None


@dataclass
class Named:
    """Tensors by their names in a checkpoint, and an optimizer's numbers and groups, as its metadata has them."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None

    def add_state(self, name: str, key: str, value: object) -> None:
        """Add a state of a parameter: a tensor of its shape, or a number."""
        if not isinstance(value, TensorEntry):
            self.numbers.setdefault(name, {})[key] = encode(value, f"{STATE}{name}.{key}", {})
            return
        full, weight = f"{STATE}{name}.{key}", self.tensors.get(MODEL + name)
        self.tensors[full] = value
        # A parameter that is one number itself has moments that are: "step" alone is known to count.
        if key == "step" or (not value.shape and weight is not None and weight.shape):
            self.numbers.setdefault(name, {})[key] = {"~tensor": full}

    def add_group(self, names: Iterable[str], settings: Mapping[str, Any], known: Iterable[str]) -> None:
        """Add the settings of some parameters: those that this optimizer knows."""
        own = {key: settings[key] for key in known if key in settings and key not in ("params", "param_names")}
        encoded = encode(own, "the settings of a group", {})
        self.groups = [*(self.groups or []), {"parameters": list(names), "settings": encoded}]


def metadata_of(files: Iterable[FileEntry], named: Named) -> Metadata:
    """The metadata of a checkpoint that has the same contents."""
    values = {} if named.groups is None else {"groups": named.groups, "skipped_steps": 0}
    # A world of 0: nothing that ranks of zeropp would have saved for themselves is expected.
    return Metadata(
        format=FORMAT, zeropp="", torch="", world=0, algorithm="crc32", stretch=STRETCH, files=tuple(files),
        tensors=named.tensors, aliases=named.aliases, coded={}, values=values, ranks=({"numbers": named.numbers},),
    )  # fmt: skip


def named_source(
    found: Found,
    names: Mapping[str, Tensor],
    optimizer: ZeroOptimizer | None,
    prefix: str | None,
) -> Source:
    """The tensors of files under the names of a checkpoint.

    Args:
        found: the files.
        names: of the model's parameters and buffers.
        optimizer: whose states are wanted, or None.
        prefix: of the model's names there, its dot included; None for what most of them have. Of several that fit
            equally well, none or a usual one ("model.", "state_dict.", "module.") is taken, with a warning.

    Raises:
        CheckpointError: no tensor has one of the names; several prefixes fit equally well, and it is not clear which is
            meant; states are there in a form that is not known.
    """
    flat = {".".join(path): value for path, value in found.entries.items()}
    tensors = {name: value for name, value in flat.items() if isinstance(value, TensorEntry)}
    if prefix is None:
        prefix = _prefix(str(found.place), tensors, names)
    if not any(prefix + name in tensors for name in names):
        raise CheckpointError(
            f"{str(found.place)!r} has none of the model's tensors under the prefix {prefix!r}: it has "
            f"{sorted(tensors)[:5]}, expected {prefix}{next(iter(names), '')} and others; give the prefix"
        )
    named = Named()
    for path, value in found.entries.items():
        full = ".".join(path)
        # At the top, what lies deeper is of something else.
        if isinstance(value, TensorEntry) and full.startswith(prefix) and (prefix or len(path) == 1):
            named.tensors[MODEL + full.removeprefix(prefix)] = value
    if optimizer is not None:
        _Optimizer(found, flat, prefix, named, optimizer, {id(each): name for name, each in names.items()}).add()
    return Source(found.folder, metadata_of(found.files, named), "none", locate=found.locate)


def _prefix(place: str, tensors: Mapping[str, object], names: Mapping[str, object]) -> str:
    """The prefix of most of the model's names."""
    # The name of most parts says most: others are ends of many names.
    probes = sorted(names, key=lambda name: (-name.count("."), name))[:20]
    found = {full.removesuffix(name) for name in probes for full in tensors if full.endswith(name)}
    fitting = Counter({each: sum(each + name in tensors for name in names) for each in found if each[-1:] in ("", ".")})
    most = max(fitting.values(), default=0)
    best = sorted(each for each, count in fitting.items() if count == most) or [""]
    if len(best) == 1:
        return best[0]
    told = f"{place!r} has {most} of the model's {len(names)} tensors under each of the prefixes {best}"
    usual = [each for each in best if _USUAL.issuperset(each.split(".")[:-1])]
    if len(usual) != 1:
        raise CheckpointError(f"{told}; say which are meant, by prefix={best[0]!r} for one")
    notify(f"{told}; those under {usual[0]!r} are taken, and any others if prefix= says so")
    return usual[0]


class _Optimizer:
    """States and settings of an optimizer, found in any of the forms that torch gives them."""

    def __init__(
        self,
        found: Found,
        flat: Mapping[str, Any],
        prefix: str,
        named: Named,
        optimizer: ZeroOptimizer,
        names: Mapping[int, str],
    ) -> None:
        self._place = str(found.place)
        self._found = found
        self._names = names
        self._named = named
        self._optimizer = optimizer
        self._known = [key for group in optimizer.param_groups for key in group]
        head = prefix
        # Of wrappers around the model, then what its states are kept under: "model_state_dict" is two of them.
        for end in ("module.", "_orig_mod.", "model.", "state_dict.", "model_"):
            head = head.removesuffix(end)
        candidates = [f"{head}{key}." for key in ("optimizer", "optimizer_state_dict", "optim", "optimizer_states.0")]
        self._flat: dict[str, Any] = {}
        for each in candidates:
            self._flat = {full.removeprefix(each): value for full, value in flat.items() if full.startswith(each)}
            if self._flat:
                break

    def add(self) -> None:
        groups = dict(self._groups())
        listed = {key: value for key, value in groups.items() if key.isdigit() and "params" in value}
        names = self._numbered(listed) if listed else {}
        for full, value in self._flat.items():
            if full.startswith("state."):
                there, _, key = full.removeprefix("state.").rpartition(".")
                self._named.add_state(names.get(there, there), key, _value(value))
        if listed:
            for value in listed.values():
                self._named.add_group([names.get(str(each), str(each)) for each in value["params"]], value, self._known)
            return
        # Settings are given by parameter here; those with equal ones become a group again.
        alike: dict[str, tuple[list[str], dict[str, Any]]] = {}
        for name, settings in groups.items():
            alike.setdefault(json.dumps(settings, default=repr, sort_keys=True), ([], settings))[0].append(name)
        for own, settings in alike.values():
            self._named.add_group(own, settings, self._known)

    def _groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """By number or by name of a parameter, its settings."""
        found: dict[str, dict[str, Any]] = {}
        for full, value in self._flat.items():
            if full.startswith("param_groups."):
                there, _, key = full.removeprefix("param_groups.").rpartition(".")
                if key in ("params", "param_names") or key in self._known:
                    found.setdefault(there, {})[key] = self._setting(_value(value), full)
        yield from found.items()

    def _setting(self, value: object, name: str) -> object:
        """A setting as a value; a learning rate may be a tensor there, of one number."""
        if not isinstance(value, TensorEntry):
            return value
        one = metadata_of(self._found.files, Named(tensors={name: value}))
        return Source(self._found.folder, one, "none", locate=self._found.locate).tensor(name).tolist()

    def _numbered(self, listed: Mapping[str, dict[str, Any]]) -> dict[str, str]:
        """Names of parameters that are numbers there, by number: those that groups list, else by their order.

        The order is torch's own way.
        """
        if all("param_names" in value for value in listed.values()):
            pairs = (zip(value["params"], value["param_names"], strict=True) for value in listed.values())
            return {str(number): name for each in pairs for number, name in each}
        given = [value["params"] for _, value in sorted(listed.items(), key=lambda item: int(item[0]))]
        if all(isinstance(each, str) for params in given for each in params):
            return {}
        own = self._optimizer.slices.given
        if [len(params) for params in given] != [len(params) for params in own]:
            raise CheckpointError(
                f"{self._place!r} numbers the optimizer's parameters, in groups of {[len(each) for each in given]}, "
                f"and here are groups of {[len(each) for each in own]}; give this optimizer the same groups in "
                "the same order"
            )
        return {
            str(number): self._names[id(parameter)]
            for params, parameters in zip(given, own, strict=True)
            for number, parameter in zip(params, parameters, strict=True)
            if id(parameter) in self._names
        }


def _value(value: object) -> object:
    return value.read() if isinstance(value, Later) else value
