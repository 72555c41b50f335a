"""A torch.distributed backend for several ranks on one GPU: gloo carries collectives of CUDA tensors via host memory.

NCCL before 2.30 allows one rank per GPU. Later versions allow several if NCCL_MULTI_RANK_GPU_ENABLE=1 is set
(``bench/gpu.sh nccl``). This backend works with any NCCL. It accepts tensors on any device, waits for the caller's
stream, and returns only when the result is in place. So it cannot reveal a missing wait or a hang of NCCL. It only has
the collectives that the engine calls with NCCL, and no send or receive. On CPU tensors the same code runs without a
GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["NAME", "register"]

NAME = "staged"
GLOO = dist.ProcessGroupGloo  # class of the process group that moves the data


class _Finished(dist.Work):
    """Work object of a collective that has already finished."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(None)
        return future


class StagedGroup(dist.ProcessGroup):
    """A process group over gloo. Its methods have the names that torch.distributed calls in torch 2.11 and 2.13."""

    def __init__(self, options: Any, backend_options: object) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.name = options.group_id
        self.gloo = GLOO(options.store, options.group_rank, options.group_size, options.timeout)

    def _run(
        self, call: Callable[[list[Tensor]], Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> dist.Work:
        """Call with host copies of ``inputs + outputs``, and copy the outputs back."""
        staged = [tensor.detach().to("cpu", copy=True).contiguous() for tensor in (*inputs, *outputs)]
        call(staged).wait()
        for tensor, result in zip(outputs, staged[len(inputs) :], strict=True):
            tensor.detach().copy_(result)
        return _Finished()

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._run(lambda staged: self.gloo.broadcast(staged, opts), [], tensors)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._run(lambda staged: self.gloo.allreduce(staged, opts), [], tensors)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        def gather(staged: list[Tensor]) -> Any:
            return self.gloo.allgather([list(staged[1].view(self.size(), -1).unbind())], [staged[0].view(-1)])

        return self._run(gather, [given], [output])

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        def exchange(staged: list[Tensor]) -> Any:
            return self.gloo.alltoall_base(staged[1], staged[0], output_sizes, input_sizes)

        return self._run(exchange, [given], [output])

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> dist.Work:
        def reduce(staged: list[Tensor]) -> Any:
            average = opts.reduceOp == dist.ReduceOp.AVG  # gloo has no AVG
            opts.reduceOp = dist.ReduceOp.SUM if average else opts.reduceOp
            work = self.gloo.allreduce([staged[0]])
            work.wait()
            own = staged[0].view(self.size(), -1)[self.rank()]
            staged[1].view(-1).copy_(own / self.size() if average else own)
            return work

        return self._run(reduce, [given], [output])

    def abort(self) -> None:
        """Abort collectives in flight, as NCCL's abort does."""
        self.gloo.abort()

    def barrier(self, opts: Any = None) -> dist.Work:
        self.gloo.barrier().wait()
        return _Finished()

    _allgather_base = all_gather_single
    alltoall_base = all_to_all_single
    _reduce_scatter_base = reduce_scatter_single

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch keeps one only for its own backends
        return self.name

    def getBackendName(self) -> str:
        return NAME


def register() -> None:
    """Register the backend, so that ``init_process_group("staged")`` works."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, StagedGroup, extended_api=True, devices=["cpu", "cuda"])
