"""Models grown from a random spec: layers of many kinds, shared, tied, frozen, recomputed, branching.

Branches depend on ``turn``, an integer in each rank's batch. So ranks may take different branches, and rounding never
decides on a branch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["WIDTH", "WORDS", "Node", "Root", "Spec", "draw_spec", "grow", "kinds"]

WIDTH, WORDS, LEAST, MOST = 6, 11, 2, 8  # LEAST and MOST: number of leaves of a model
Spec = tuple[Any, ...]

SHARED = ("again", "tied", "outside")  # an earlier module; a layer with an earlier weight; only an earlier weight
LEAVES = (
    "linear", "linear", "bare", "norm", "raw", "scalar", "gru", "conv", "attention", "embedding", "average", "in place",
    "pieces", "function", "unused", "detached", "hooked", "mixed", *SHARED,
)  # fmt: skip
ONE = (
    "residual", "twice", "loop", "frozen", "aside", "skipped", "checkpoint", "reentrant", "kept", "part only",
    "without gradients", "dict", "tuple", "record",
)  # fmt: skip
TWO = ("either", "either way round", "wasted", "sum")
FORMS = ("tensor", "dict", "tuple", "record", "list")  # forms of the output of the whole model


@dataclass
class Record:
    y: Tensor
    extra: Tensor | None = None


def draw_spec(draw: random.Random) -> Spec:
    """Draw the spec of a model: (form of the outputs, head, True if forward adds up kept losses, *parts)."""
    left = draw.randint(LEAST, MOST)

    def part(depth: int) -> Spec:
        nonlocal left
        if depth == 0 or left < 2 or draw.random() < 0.3:
            left -= 1
            return draw.choice(LEAVES), draw.randrange(60)
        kind = draw.choice(("list", "sequence", *ONE, *TWO))
        count = draw.randint(2, 3) if kind in ("list", "sequence") else 2 if kind in TWO else 1
        return kind, draw.randrange(60), *(part(depth - 1) for _ in range(count))

    head = draw.choice(("tied", "bias", "bare"))
    return draw.choice(FORMS), head, draw.random() < 0.7, *(part(3) for _ in range(draw.randint(2, 4)))


def kinds(spec: Any) -> set[str]:
    """Return all words of a spec."""
    if isinstance(spec, tuple):
        return set().union(*map(kinds, spec)) if spec else set()
    return {spec} if isinstance(spec, str) else set()


class Product(torch.autograd.Function):
    """A product with a weight that backward reads from the saved tensors or, with ``aside``, from the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, aside: bool) -> Tensor:
        ctx.weight = weight if aside else None
        ctx.save_for_backward(x, *(() if aside else (weight,)))
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, *rest = ctx.saved_tensors
        weight = ctx.weight if ctx.weight is not None else rest[0]
        flat = grads[0].flatten(0, -2)
        return grads[0] @ weight.t(), x.flatten(0, -2).t() @ flat, None


class Node(nn.Module):
    """A part of a model.

    Attributes:
        number: selects a variant of the kind.
        fails: True to raise an error in the next forward.
        kept: a loss that the last forward has stored here.
    """

    def __init__(self, kind: str, number: int, *parts: nn.Module) -> None:
        super().__init__()
        self.kind, self.number = kind, number
        self.parts = nn.ModuleList(parts)
        self.fails = False
        self.kept: Any = None

    def forward(self, x: Tensor, turn: int) -> Any:
        if self.fails:
            raise ArithmeticError("told to fail")
        return self.run(x, turn)

    def run(self, x: Tensor, turn: int) -> Any:
        raise NotImplementedError

    def part(self, index: int, x: Tensor, turn: int) -> Tensor:
        module = self.parts[index]
        return taken(module(x, turn) if isinstance(module, Node) else module(x))


def taken(output: Any) -> Tensor:
    """Return the tensor in an output of any form."""
    if isinstance(output, dict):
        output = output["y"]
    elif isinstance(output, Record):
        output = output.y
    elif isinstance(output, (tuple, list)):
        output = next(value for value in output if isinstance(value, Tensor))
    assert isinstance(output, Tensor)
    return output


class Leaf(Node):
    """A layer, or a part with parameters of its own."""

    def __init__(self, kind: str, number: int, others: list[nn.Linear]) -> None:
        super().__init__(kind, number)
        if kind == "norm":
            self.layer: Any = nn.LayerNorm(WIDTH, elementwise_affine=number % 5 > 0)
        elif kind == "gru":
            self.layer = nn.GRU(WIDTH, WIDTH, num_layers=1 + number % 2, batch_first=True)
        elif kind == "conv":
            self.layer = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        elif kind == "attention":
            self.layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        elif kind == "embedding":
            self.layer = nn.Embedding(WORDS, WIDTH)
        elif kind in ("raw", "unused", "average"):  # a parameter of a module that is never called
            self.store = nn.Module()
            self.store.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        elif kind == "scalar":
            self.gain = nn.Parameter(torch.tensor(0.9))
        elif kind == "pieces":
            self.rows = nn.Parameter(0.4 * torch.randn(3, WIDTH))
        elif kind == "function":
            self.weight = nn.Parameter(0.4 * torch.randn(WIDTH, WIDTH))
        elif kind == "outside":
            self.others = tuple(others[number % len(others) :][:1]) if others else ()
        else:
            self.layer = nn.Linear(WIDTH, WIDTH, bias=kind != "bare")
        if kind == "average":
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        if kind == "hooked":
            self.layer.weight.register_hook(lambda grad: grad * 0.5)
        if kind == "tied" and others:
            self.layer.weight = others[number % len(others)].weight

    def run(self, x: Tensor, turn: int) -> Tensor:
        special: Callable[[Tensor], Tensor] | None = getattr(self, "run_" + self.kind.replace(" ", "_"), None)
        return special(x) if special is not None else torch.tanh(self.layer(x))

    def run_norm(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def run_gru(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]

    def run_conv(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x.transpose(1, 2)).transpose(1, 2))

    def run_attention(self, x: Tensor) -> Tensor:
        return x + self.layer(x, x, x, need_weights=self.number % 2 == 0)[0]

    def run_embedding(self, x: Tensor) -> Tensor:
        return x + self.layer(torch.arange(self.number, self.number + x.shape[1]) % WORDS)

    def run_raw(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.store.gain

    def run_unused(self, x: Tensor) -> Tensor:
        return x

    def run_average(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
                self.count += 1
        return x * self.store.gain - self.mean.to(x.dtype)

    def run_scalar(self, x: Tensor) -> Tensor:
        return x * self.gain

    def run_pieces(self, x: Tensor) -> Tensor:
        one, two, three = self.rows.unbind(0)
        return torch.tanh(x * (1 + one) + torch.cat([two[:2], three[2:]]))

    def run_function(self, x: Tensor) -> Tensor:
        return torch.tanh(Product.apply(x, self.weight, self.number % 2 == 0))

    def run_in_place(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.number % 3 == 0:
            return x + y.relu_()
        return torch.tanh(y.add_(1)) if self.number % 3 == 1 else F.silu(y, inplace=True)

    def run_detached(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.layer.weight.detach(), self.layer.bias))

    def run_mixed(self, x: Tensor) -> Tensor:
        return x + self.layer(x.to(self.layer.weight.dtype)).to(x.dtype)

    def run_outside(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.others[0].weight)) if self.others else x


class Branch(Node):
    """A part that calls other parts."""

    def run(self, x: Tensor, turn: int) -> Any:
        special: Callable[[Tensor, int], Any] | None = getattr(self, "run_" + self.kind.replace(" ", "_"), None)
        if special is not None:
            return special(x, turn)
        for index in range(len(self.parts)):
            x = self.part(index, x, turn)
        return x

    def chosen(self, turn: int) -> bool:
        return bool(turn >> self.number % 7 & 1)

    def run_residual(self, x: Tensor, turn: int) -> Tensor:
        return x + torch.tanh(self.part(0, x, turn))

    def run_twice(self, x: Tensor, turn: int) -> Tensor:
        return self.part(0, torch.tanh(self.part(0, x, turn)), turn)

    def run_loop(self, x: Tensor, turn: int) -> Tensor:
        for _ in range(1 + (turn + 1) % 3):
            x = torch.tanh(self.part(0, x, turn))
        return x

    def run_aside(self, x: Tensor, turn: int) -> Tensor:
        return x + self.part(0, x.detach(), turn)

    def run_skipped(self, x: Tensor, turn: int) -> Tensor:
        return self.part(0, x, turn) if self.chosen(turn) else x

    def run_either(self, x: Tensor, turn: int) -> Tensor:
        return self.part(0, x, turn) if self.chosen(turn) else 0.5 * self.part(1, x, turn)

    def run_either_way_round(self, x: Tensor, turn: int) -> Tensor:
        first = int(self.chosen(turn))
        return self.part(1 - first, self.part(first, x, turn), turn)

    def run_sum(self, x: Tensor, turn: int) -> Tensor:
        return 0.5 * (self.part(0, x, turn) + self.part(1, x, turn))

    def run_wasted(self, x: Tensor, turn: int) -> Tensor:
        self.part(1, x, turn)
        return self.part(0, x, turn)

    def run_checkpoint(self, x: Tensor, turn: int) -> Tensor:
        y: Tensor = checkpoint(self.part, 0, x, turn, use_reentrant=False)
        return y

    def run_reentrant(self, x: Tensor, turn: int) -> Tensor:
        if not x.requires_grad:
            return self.part(0, x, turn)
        y: Tensor = checkpoint(self.part, 0, x, turn, use_reentrant=True)
        return y

    def run_kept(self, x: Tensor, turn: int) -> Tensor:
        loss = 0.1 * self.part(0, x, turn).square().mean()
        self.kept = loss if self.number % 2 else {"losses": [loss]}
        return x

    def run_part_only(self, x: Tensor, turn: int) -> list[Tensor]:
        """Return two outputs, of which the caller uses one."""
        y = self.part(0, x, turn)
        return [y * 0.5, y.sum()]

    def run_without_gradients(self, x: Tensor, turn: int) -> Tensor:
        with torch.no_grad():
            y = self.part(0, x, turn)
        return x + y

    def run_dict(self, x: Tensor, turn: int) -> dict[str, Any]:
        return {"nothing": None, "y": self.part(0, x, turn)}

    def run_tuple(self, x: Tensor, turn: int) -> tuple[Any, ...]:
        return None, self.part(0, x, turn), 3

    def run_record(self, x: Tensor, turn: int) -> Record:
        return Record(self.part(0, x, turn))


class Grower:
    """A factory of modules that stores them for parts that share one."""

    def __init__(self, first: nn.Linear) -> None:
        self.made: list[nn.Module] = [first]
        self.linears = [first]

    def make(self, spec: Spec) -> nn.Module:
        kind, number, *children = spec
        if kind == "again" and self.made:
            return self.made[number % len(self.made)]
        if kind == "again":
            kind = "linear"
        if children:
            parts = [self.make(child) for child in children]
            if kind == "sequence" and not any(isinstance(part, Node) for part in parts):
                return nn.Sequential(*parts)
            module: nn.Module = Branch(kind, number, *parts)
            if kind == "frozen":
                module.requires_grad_(False)
            elif number % 5 == 0:
                self.made.append(module)
            return module
        if kind == "linear" and number % 2:
            module = nn.Linear(WIDTH, WIDTH)
        else:
            module = Leaf(kind, number, self.linears)
            if kind != "mixed":  # a layer of another dtype cannot be tied
                self.linears += [layer for layer in module.modules() if type(layer) is nn.Linear]
        self.made.append(module)
        return module


class Root(nn.Module):
    """A whole model. Its inputs are rows, words and the turn; its output, in the spec's form, yields two losses."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.form, head, self.gathers, *parts = spec
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        grower = Grower(self.first)
        self.body = nn.ModuleList(grower.make(part) for part in parts)
        self.head = nn.Linear(WIDTH, WORDS, bias=head != "bare")
        if head == "tied":
            self.head.weight = self.words.weight

    def forward(self, x: Tensor, words: Tensor, turn: int) -> Any:
        x = self.first(x + self.words(words))
        for part in self.body:
            x = taken(part(x, turn) if isinstance(part, Node) else part(x))
        y = self.head(x)
        extra = self.kept_losses() if self.gathers else None
        if self.form == "tensor":
            return y if extra is None else y + extra
        if self.form == "record":
            return Record(y, extra)
        return {"dict": {"y": y, "extra": extra}, "tuple": (y, "text", extra), "list": [y, [extra]]}[self.form]

    def kept_losses(self) -> Tensor | None:
        """Return the sum of the losses that the last forward has stored on parts, and remove them from the parts."""
        found: list[Tensor] = []
        for part in self.modules():
            if isinstance(part, Node) and part.kept is not None:
                found.append(part.kept["losses"][0] if isinstance(part.kept, dict) else part.kept)
                part.kept = None
        return torch.stack(found).sum() if found else None

    def losses(self, output: Any) -> tuple[Tensor, Tensor]:
        """Return two losses computed from an output of this model."""
        y = taken(output).to(torch.float64)
        extra = {"dict": lambda o: o["extra"], "record": lambda o: o.extra, "list": lambda o: o[1][0]}
        found = extra[self.form](output) if self.form in extra else output[2] if self.form == "tuple" else None
        kept = None if self.gathers else self.kept_losses()
        two = torch.sin(y).mean()
        for each in (found, kept):
            two = two if each is None else two + each
        return y.square().mean(), two


def grow(spec: Spec, dtype: torch.dtype) -> Root:
    """Return the model of a spec, with the same weights every time.

    ``mixed`` layers are float32 in a float64 model.
    """
    torch.manual_seed(1)
    model = Root(spec).to(dtype)
    for part in model.modules():
        if isinstance(part, Leaf) and part.kind == "mixed" and dtype == torch.float64:
            part.layer.float()
    return model
