"""The `zeropp` block: settings that the DeepSpeed format has no key for."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Le
from pydantic import BeforeValidator

from zeropp.config.base import Block, Bound, Count, Positive, PositiveReal, integer

# older pydantic does not find 8.0 among the choices
Bits = Annotated[Literal[4, 8, 16, 32], BeforeValidator(integer)]

# Seconds; backends count nanoseconds in 64 bits, which hold about 9e9 seconds.
LONGEST_TIMEOUT = 100_000_000
Seconds = Annotated[PositiveReal, Le(LONGEST_TIMEOUT)]


class GradientBitsConfig(Block):
    """Width of gradients on the wire, hop by hop. 16 and 32 are plain values, fewer are quantized."""

    local: Bits = 8
    """Bits an element takes between ranks of one node."""

    cross: Bits = 4
    """Bits an element takes between nodes; also the width where there is only one hop."""


class MaxCtasConfig(Block):
    """Thread blocks that the kernels of one NCCL communicator have at most; NCCL calls it maxCTAs.

    More of them move bytes faster and leave fewer multiprocessors to the model. Wrapping refuses limits whose sum over
    the communicators is more than the card has.
    """

    local: Positive | None = None
    """Of a communicator inside a node. `null` takes 16, and at most an eighth of the card's multiprocessors."""

    cross: Positive | None = None
    """Of a communicator between nodes. `null` takes 8, and at most a sixteenth."""


class ExtensionConfig(Block):
    """Settings of zeropp itself. DeepSpeed does not know this block."""

    local_world_size: Positive | None = None
    """Ranks on one node. `null` takes the environment variable `LOCAL_WORLD_SIZE`, which launchers set; where
    there is none, each host is a node."""

    unit_numel: Bound = 0
    """Elements above which a unit is cut into the units of its submodules, further down the module tree.
    Smaller units need less memory at once and more collectives. 0 cuts nothing beyond the default units."""

    unit_min_blocks: Count = 128
    """Blocks of 256 elements that each rank's piece of a unit holds at least. A smaller unit merges with
    its neighbours, or its parameters become persistent, which bounds padding by 1 %. 0 merges nothing."""

    host_memory_limit: Positive | None = None
    """Bytes of a host's memory that the ranks of a node may have together. A configuration that cannot stay below is
    refused on every rank, with what takes how much and which settings take less, before the model is changed; so is, in
    `zero.Init` and `materialize`, a model as soon as its pieces alone are more. `zeropp.plan.memory` counts; Python,
    torch, activations, buffers and the model as it was built are not in it. `null` asks for no limit."""

    hang_timeout: Seconds = 420.0
    """Seconds that a rank waits for a collective before it raises and names the units each rank waits for. Torch ends
    the process without these names 480 s after its own watchdog stands still, unless
    `TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC` says otherwise."""

    max_ctas: MaxCtasConfig = MaxCtasConfig()
    """Thread blocks of NCCL's kernels, by link."""

    share_communicators: bool = True
    """Lets the engines of one process use the same NCCL communicators where their ranks are the same. Then all ranks
    must use the engines in the same order. False gives each engine its own, and costs their memory."""

    warn_after: Seconds | None = 30.0
    """Seconds after which a rank that waits for others logs once who waits where; long before
    `hang_timeout`. `null` never does."""

    static_graph: bool = False
    """Promises that all passes of a kind (training forwards, their backwards, evaluation) use the same modules in
    the same order, on every rank and every time. Passes that have varied, or that do not use all modules, then
    exchange nothing at their end either, and nothing else is ever learned: a pass that needs another module is an error
    on every rank. On a card, hosts then go on without waiting for the sum of gradient norms, if a fused Adam steps."""

    lazy_step: bool = True
    """Lets `step()` return once it is decided, where states are offloaded: the host then steps one unit after
    another in the order of the next forward, beside it, and whatever uses a unit waits for that one. The results are
    the same. False steps all of them first."""

    warm_up: bool = True
    """On a card, compiles kernels while the model is wrapped, and not in the middle of its first step."""

    cast_inputs: bool = True
    """Casts floating inputs of the root module to the compute type when `bf16` or `fp16` is enabled."""

    # Null and not a block of defaults: to set it without zero_quantized_gradients is worth a warning.
    gradient_bits: GradientBitsConfig | None = None
    """Bits of a gradient element on each hop, in place of what `zero_quantized_gradients` stands for."""

    reduce_scatter: Literal["auto", "exchange", "backend", "low_latency"] = "auto"
    """Who sums gradients that travel as plain values: each rank, in float32, after an exchange, or the backend's
    reduce-scatter, on the way and in the type on the wire, in an order of its own. The latter needs no memory for the
    messages of all ranks, rounds 16-bit sums once a rank, and sends twice the bytes over gloo. `auto` takes it over
    NCCL on a 32-bit wire. `low_latency` does, too, and takes it between 32 nodes or more for 16-bit parts below
    512 KiB, where NCCL's PAT algorithm has log2(n) steps in place of n - 1 messages. PAT rounds the sum to 16 bits at
    each step: in bf16 over 128 nodes up to 7 x 2^-9 = 1.4 % of the largest partial sum, where an exchange rounds
    once."""

    feedback: Literal["cross", "both"] = "cross"
    """Hops that carry quantization errors over when `zeropp_loco_param` is given. `cross` costs 1/L byte
    per parameter on a rank, L ranks to a node; `both` costs 1 byte more, unsharded."""

    hadamard: bool = False
    """Rotates groups of 32 gradient elements before they are quantized, which spreads outliers over a
    group."""

    weight_codec: Literal["int8", "delta4", "lossless"] | None = None
    """Encoding of weights when they are gathered: 8-bit blocks, 4-bit differences to what every rank holds, or
    lossless differences. `null` follows `zero_quantized_weights`."""

    secondary: Literal["weights", "codes"] = "weights"
    """Contents of a secondary shard: weights in the compute type, or the received codes at half the
    bytes."""

    defer_cross_reduction: bool = False
    """Sums gradients inside a node over all micro-batches and sends them between nodes once an optimizer
    step, if `gradient_accumulation_steps` says how many there are. It costs fp32 gradients at the level of the node."""
