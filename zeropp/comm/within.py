"""A limit for calls that have none of their own, such as those of torch's key-value store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

__all__ = ["within"]

_T = TypeVar("_T")


def within(seconds: float, call: Callable[[], _T], doing: str) -> _T:
    """Run ``call`` on a thread of its own and return or raise what it does; one that takes longer is left behind.

    Raises:
        TimeoutError: it did not return within ``seconds`` of ``doing`` this.
    """
    answers: SimpleQueue[tuple[_T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    # A daemon: a call that never returns must not keep the program from ending.
    threading.Thread(target=work, name="zeropp limited", daemon=True).start()
    try:
        result, error = answers.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"{doing} took longer than {seconds:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
