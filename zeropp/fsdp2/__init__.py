"""Quantized communication for models sharded with FSDP2 (``torch.distributed.fsdp.fully_shard``).

FSDP2 keeps its own hooks, prefetching, streams and state dicts. Only its collectives are replaced: they use zeropp's
codecs and hops::

    for block in model.blocks:
        fully_shard(block, reshard_after_forward=8)
    fully_shard(model)
    adapter = zeropp.fsdp2.apply(model)       # before the first forward
    ...                                       # train as before
    print(adapter.ledger)                     # bytes this rank has sent, by module and hop

This package uses codecs, hops and FSDP2's classes, and nothing of zeropp's engine. Start with `install`.
"""

from __future__ import annotations

from zeropp.fsdp2.install import Adapter, apply

__all__ = ["Adapter", "apply"]
