"""The batch triple: global batch = micro-batch x accumulation steps x ranks."""

from __future__ import annotations

from zeropp.config.errors import ConfigError

Triple = tuple[int | None, int | None, int]


def resolve_batch(train: int | None, micro: int | None, steps: int | None, world_size: int) -> Triple:
    """Completes (train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps).

    Sizes are in samples; the first counts all ranks, the second one rank. Two of the three give the third,
    one size alone stands with a single accumulation step. Without either size both stay None, and the number
    of accumulation steps is what was given, or 1.

    Raises ConfigError where the three cannot agree, and where world_size is below 1.
    """
    # True is 1 to a comparison.
    if isinstance(world_size, bool) or world_size < 1:
        raise ConfigError(f"world_size: got {world_size!r}, expected the number of ranks, at least 1")
    # Kept for the message, which tells given sizes from derived ones.
    given = (train, micro, steps)
    if micro is None:
        steps = steps or 1
        if train is None:
            return None, None, steps
        # Divided without a remainder or not: the check at the end finds out, and names all three.
        micro = train // (steps * world_size)
    elif train is None:
        steps = steps or 1
        train = micro * steps * world_size
    else:
        # 0 where the batch is too small, which the check refuses as well.
        steps = steps or train // (micro * world_size)
    full = (train, micro, steps)
    if train != micro * steps * world_size:
        raise ConfigError(_disagreement(given, full, world_size))
    return full


def _disagreement(given: tuple[int | None, ...], full: tuple[int, int, int], world_size: int) -> str:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    parts = [
        f"{name} {value} ({'given' if had is not None else 'derived'})"
        for name, had, value in zip(names, given, full, strict=True)
    ]
    # The product of the sizes as they are, derived ones included, so that the reader can check the sum.
    product = full[1] * full[2] * world_size
    return (
        f"{', '.join(parts)} and world size {world_size} do not agree: expected train_batch_size = "
        f"micro-batch x accumulation steps x world size, which is {product}; "
        "change one of the given values, or remove one so that it is derived"
    )
