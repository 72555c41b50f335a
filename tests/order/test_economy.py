"""Known passes need no exchange, no useless gather and no useless reduction; see :mod:`tests.order.economy`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.order.economy import ECONOMIES


@pytest.mark.parametrize("holds", ECONOMIES, ids=lambda holds: holds.__name__.replace("_", " "))
def test_no_more_is_said_gathered_and_sent_than_must_be(holds: Callable[[], None]) -> None:
    holds()
