"""Whole values of parameters that were built to be partitioned, before an engine manages them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from zeropp.params.fingerprint import digest_of, fingerprint
from zeropp.params.piece import Piece, piece_of
from zeropp.params.spread import Spread

__all__ = ["PiecesLoan", "spreads_of"]


def spreads_of(parameters: Sequence[nn.Parameter]) -> list[tuple[Spread, list[nn.Parameter]]]:
    """Parameters that nobody manages yet, by who spreads them."""
    found: dict[int, tuple[Spread, list[nn.Parameter]]] = {}
    for parameter in parameters:
        piece = piece_of(parameter)
        if piece is not None and isinstance(piece.fetcher, Spread):
            found.setdefault(id(piece.fetcher), (piece.fetcher, []))[1].append(parameter)
    return list(found.values())


class PiecesLoan:
    """Whole values of one group's parameters, lent to them; made on entering, collective.

    Attributes:
        lent: parameters, by identity, and what they are called.
    """

    def __init__(self, spread: Spread, parameters: list[nn.Parameter], modifier_rank: int | None) -> None:
        if modifier_rank is not None and modifier_rank not in spread.carrier.ranks:
            ranks = list(spread.carrier.ranks)
            raise ValueError(f"modifier_rank is {modifier_rank}; expected one of the model's ranks {ranks}, or None")
        self._spread = spread
        self._modifier_rank = modifier_rank
        self._pieces = [(parameter, _piece(parameter)) for parameter in parameters]
        self.lent = {parameter: piece.name for parameter, piece in self._pieces}
        lent = [piece.name for _, piece in self._pieces if piece.lent]
        if lent:
            raise RuntimeError(f"{lent} are gathered already, by a GatheredParameters that has not been left")
        awaited = [piece.name for _, piece in self._pieces if piece.awaited]
        if awaited:
            raise RuntimeError(f"{awaited[:10]} have no values before the model is wrapped and they are loaded")
        doing = "entering GatheredParameters"
        spread.agree(f"{doing} with modifier_rank {modifier_rank}", parameters, None)
        if spread.building:
            # Each rank has what it built, until rank 0's values are everyone's.
            spread.broadcast([parameter for parameter, piece in self._pieces if piece.row is None])
        spread.gather(parameters, lent=True)
        for parameter, piece in self._pieces:
            piece.lend(parameter)
        self._before = [(tuple(p.shape), p.dtype) for p in parameters]
        # Without a modifier_rank edits would be lost, so they have to be found. With one they are kept anyway.
        self._prints = [fingerprint(p.data) for p in parameters] if modifier_rank is None else []
        # What is whole, and small, must be as it was if an edit is refused.
        whole = [(p, p.data.clone()) for p, piece in self._pieces if piece.row is None and modifier_rank is None]
        self._restored = dict(whole)
        self._values: list[Tensor] = []

    def give_back(self) -> None:
        """Take the parameters back; the user's values are kept until :meth:`finish`."""
        self._values = [parameter.data for parameter, _ in self._pieces]
        for parameter, piece in self._pieces:
            piece.take_back(parameter)

    def tell(self, error: BaseException) -> None:
        """The block has failed on this rank; the others may be about to leave it, and must not wait."""
        self._spread.tell(error)

    def finish(self) -> None:
        """Every rank takes its part of the edits; or learns that some rank made one that cannot be kept."""
        spread, keeps = self._spread, self._modifier_rank
        edits, wrong = self._edits() if keeps is None else {}, self._misshapen()
        parameters = [parameter for parameter, _ in self._pieces]
        own = bool(wrong), digest_of(edits.items()) if edits else 0
        accounts = spread.agree("leaving GatheredParameters", parameters, own)
        if keeps is None and accounts[0][1] and all(each == accounts[0] for each in accounts):
            # All ranks have made the same edits, and any of them has what is meant.
            keeps = spread.carrier.ranks[0]
        lost = [index for index, (bad, edited) in enumerate(accounts) if bad or (keeps is None and edited)]
        if lost:
            for parameter, value in self._restored.items():
                parameter.data = value
            ranks = [spread.carrier.ranks[index] for index in lost]
            raise RuntimeError(
                f"edits made inside GatheredParameters on ranks {ranks} are lost: "
                f"{wrong or list(edits) or 'see the error there'}. Say whose edits are kept, "
                "GatheredParameters(params, modifier_rank=0), or make the same ones on every rank, and keep shapes as "
                "they are"
            )
        if keeps is None:
            return
        source = spread.carrier.ranks.index(keeps)
        whole: list[nn.Parameter] = []
        cut: list[nn.Parameter] = []
        for (parameter, piece), (_, dtype), value in zip(self._pieces, self._before, self._values, strict=True):
            (whole if piece.row is None else cut).append(parameter)
            # The user may have given another dtype.
            piece.show(parameter, value.detach().to(dtype), lent=True)
        spread.broadcast(whole, source)
        spread.scatter(cut, source)

    def _edits(self) -> dict[str, object]:
        """Parameters that were edited, by name, and what tells their values from others."""
        rows = zip(self._pieces, self._prints, map(fingerprint, self._values), strict=True)
        return {piece.name: new for (_, piece), old, new in rows if old != new}

    def _misshapen(self) -> list[str]:
        """Parameters that were given a tensor of another shape."""
        rows = zip(self.lent.values(), self._before, self._values, strict=True)
        return [f"{name} of shape {old} got {tuple(new.shape)}" for name, (old, _), new in rows if new.shape != old]


def _piece(parameter: nn.Parameter) -> Piece:
    piece = piece_of(parameter)
    assert piece is not None  # the caller has looked
    return piece
