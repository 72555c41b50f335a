"""The swap of a buffer's parameters between their gathered values and stand-ins; the generation of prepared work.

[Note: versions] Autograd must notice if the values of a saved weight were freed or stepped. So the version counter of
each parameter is set: 2 * v while the unit is unsharded at weight version v, and 2 * v + 1 while it is released.
Autograd then refuses to read a saved tensor whose unit is released or was stepped since. Any other counter value shows
that the user edited the parameter in place.

[Note: generation] Work that repeats is prepared once, and prepared again after a change of the objects that it uses.

- A `Swap` keeps tuples of a parameter, its two classes, and its values or stand-in. It makes them again when values
  move, and when the user sets the class of a parameter.
- A unit keeps the stages of its gather, with their tensors (`Unit.prepare_gather`). Main weights may move to other
  memory, and parameters to new buffers. Each such change advances one counter, the `Generation`. Stages that were
  prepared at an older number are prepared again before they run.
- A gradient's reduction belongs to one message and one shard (`Gradient.prepare_reduce` compares both).
- One hook reports the gradients of a unit only while their order repeats; see [Note: one hook a unit].
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from zeropp._compat import set_versions, unguarded
from zeropp.params.guard import guarded_class, own_class

__all__ = ["Generation", "Swap"]


class Generation:
    """The number of changes that outdate prepared work; see [Note: generation].

    Attributes:
        number: number of changes so far.
    """

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def advance(self) -> None:
        """Outdate all work that has been prepared so far."""
        self.number += 1


class Swap:
    """Points the parameters of one buffer at their values or at stand-ins without values, and guards them meanwhile.

    Args:
        names: names of the parameters, for errors.
        parameters: the model's own parameter objects.
        values: views of the gathered values, one per parameter.
        absent: stand-ins, one per parameter.

    Attributes:
        absent: stand-ins, one per parameter.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        values: Sequence[Tensor],
        absent: Sequence[Tensor],
    ) -> None:
        self._names = names
        self._parameters = tuple(parameters)
        self._values = values
        self.absent = absent
        # Version counter that was set last; another value shows an edit in place. See [Note: versions].
        self._noted = 0
        self._version = -1  # weight version of the two tuples below
        self._shown: tuple[int, ...] = ()
        self._hidden: tuple[int, ...] = ()
        self.prepare()

    def set_values(self, values: Sequence[Tensor]) -> None:
        """Point the parameters at other memory from the next :meth:`show` on; ``values`` has one view per parameter."""
        self._values = values
        self.prepare()

    def prepare(self) -> None:
        """Make the tuples for :meth:`show` and :meth:`hide`: each parameter, its two classes, and its new ``.data``."""
        own = [own_class(parameter) for parameter in self._parameters]
        guarded = [guarded_class(each) for each in own]
        self._to_values = tuple(zip(self._parameters, own, guarded, self._values, strict=True))
        self._to_absent = tuple(zip(self._parameters, own, guarded, self.absent, strict=True))

    def _number(self, version: int) -> None:
        """Compute the version counters that all parameters get at a weight version, once per step."""
        self._version = version
        self._shown = (2 * version,) * len(self._parameters)
        self._hidden = (2 * version + 1,) * len(self._parameters)

    def show(self, version: int) -> None:
        """Point the parameters at their values, of this weight version, and unguard them.

        Raises:
            RuntimeError: A parameter was edited while it was released.
        """
        noted = self._noted
        edited = outdated = False
        for parameter, own, guarded, value in self._to_values:
            if parameter.__class__ is not guarded:  # set by the user, or not guarded
                outdated |= own_class(parameter) is not own
                own = own_class(parameter)
            # Unguard first: setting ``.data`` of a guarded parameter would count as a use of the parameter.
            parameter.__class__ = own
            if parameter._version != noted:
                edited = True
            # Setting ``.data`` keeps the parameter object and its version counter. See [Note: versions].
            parameter.data = value
        if outdated:
            self.prepare()
        if version != self._version:
            self._number(version)
        self._end(self._shown, edited)

    def hide(self, version: int) -> None:
        """Point the parameters at their stand-ins, and guard them; see `zeropp.params.guard`.

        Raises:
            RuntimeError: A parameter was edited while it was unsharded.
        """
        noted = self._noted
        edited = False
        for parameter, own, guarded, absent in self._to_absent:
            if parameter.__class__ is not own:  # set by the user, or guarded already; the next show() prepares
                parameter.__class__ = own_class(parameter)
                guarded = guarded_class(parameter.__class__)  # of this parameter alone
            if parameter._version != noted:
                edited = True
            parameter.data = absent
            parameter.__class__ = guarded
        if version != self._version:
            self._number(version)
        self._end(self._hidden, edited)

    def _end(self, versions: tuple[int, ...], edited: bool) -> None:
        """Set the version counters after a swap; raise if a parameter was ``edited`` before."""
        # Look for edits first, because setting the version counter hides them. Raise last, so that the swap is
        # complete.
        names = self._edited() if edited else None
        # Without this, as in FSDP2, a graph recorded before a step would silently read newer weights in its backward.
        set_versions(self._parameters, versions)
        self._noted = versions[0] if versions else 0
        if names:
            raise RuntimeError(
                f"{names} were edited in place, and the edit is lost or stays on this rank: modules compute with "
                "copies of the main weights. To set weights use "
                "zeropp.zero.GatheredParameters(parameters, modifier_rank=0) or model.load_state_dict(...) on every "
                "rank, between steps"
            )

    def _edited(self) -> list[str]:
        with unguarded():
            pairs = zip(self._names, self._parameters, strict=True)
            return [name for name, parameter in pairs if parameter._version != self._noted]

    def accept(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give these parameters the version counter that was set last, so that their edits are no errors."""
        set_versions(tuple(parameters), (self._noted,) * len(parameters))
