"""``offload_states``: device memory, except a few numbers, is freed between phases.

All of it except gathered weights is restored bit for bit. Operations that need offloaded memory raise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.all_parameter_kinds import CODED
from tests.support.branching_models import WIDTH, Routed, make_config
from tests.support.offload_pairs import Run, host_apart, run, same
from tests.support.owned_memory import owned_bytes
from tests.support.rank_pool import run_ranks

BF16 = {"bf16": {"enabled": True}}
HPZ = {"zero_hpz_partition_size": 2, **BF16}
LOCO = {"zeropp_loco_param": {}, "feedback": "both"}
# By name: settings, and the kinds of memory that exist with these settings on several ranks, besides main weights,
# gradients and states. In rows named "apart" these are in host memory or files (in "a part": some of the states only).
ROWS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "stage 0": ({"stage": 0}, set()),
    "stage 0, bf16": ({"stage": 0, **BF16}, {"persistent_weights"}),
    "stage 1": ({"stage": 1, **BF16}, {"persistent_weights"}),
    "stage 2": ({"stage": 2, **BF16}, {"persistent_weights"}),
    "stage 3": ({}, set()),
    "stage 3, bf16": (BF16, set()),
    "persistent": ({"persist": 1000, **BF16}, {"persistent_weights"}),
    "hpz": (HPZ, {"secondary_weights"}),
    "hpz, codes": ({**CODED, **HPZ, "secondary": "codes"}, {"secondary_weights"}),
    "loco": ({**CODED, **LOCO, **BF16}, {"feedback"}),
    "delta4": ({**HPZ, "weight_codec": "delta4", "persist": 1000}, {"secondary_weights", "persistent_weights"}),
    "lossless": ({**HPZ, "weight_codec": "lossless"}, {"secondary_weights"}),
    "deferred": ({"defer_cross_reduction": True, **BF16}, {"held_gradients"}),
    "offload_optimizer": ({"offload_optimizer": {"device": "cpu"}, "persist": 1000, **BF16}, {"persistent_weights"}),
    "apart": ({"offload_optimizer": {"device": "cpu"}, **BF16}, {"wire_weights"}),
    "apart, persistent": ({"offload_optimizer": {"device": "cpu"}, "persist": 1000, **BF16}, {"persistent_weights"}),
    "apart, with weights": (
        {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}, **BF16}, set(),
    ),
    "apart, a part": ({"offload_optimizer": {"device": "cpu", "ratio": 0.4}}, {"main_weights", "states"}),
    "apart, in files": (
        {
            "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme", "max_in_cpu": 0},
            "aio": {"block_size": 1024}, **BF16,
        },
        set(),
    ),
}  # fmt: skip
ALL = {"optim_states", "hp_params", "lp_params", "lp_grads", "carried_errors"}
HERE = torch.device("cpu")
SHARDS = "shards"  # stands for the kind that slices belong to: "lp_params", or "hp_params" if weights are cached


def owned(optimizer: zeropp.ZeroOptimizer) -> dict[str, int]:
    """Return bytes by kind of memory on the device, with "states", and all bytes in host memory and files as "host"."""
    found = owned_bytes(optimizer)
    del found["gradient_norms"], found["edit_markers"]  # a few numbers, which are not moved
    found["host"] = sum(sum(owned_bytes(optimizer, place).values()) for place in ("host", "disk"))
    found["states"] = 0
    for part in optimizer.slices.all:
        states = optimizer.inner.state.get(part.parameter, {}).values()
        place = "host" if part.on_host and not optimizer.engine.maker.tiers.main.serves(HERE) else "states"
        found[place] += sum(s.untyped_storage().nbytes() for s in states if isinstance(s, torch.Tensor) and s.dim())
    return found


class Pauses:
    """Callback that moves everything to the host and back after each backward and step.

    Args:
        stays: kinds of memory that are not freed.

    Attributes:
        wrong: texts on memory that was not freed or restored as expected.
        seen: kinds of memory that existed.
    """

    def __init__(self, stays: set[str]) -> None:
        self._stays = stays
        self.wrong: list[str] = []
        self.seen: set[str] = set()

    def __call__(self, model: nn.Module, optimizer: zeropp.ZeroOptimizer, when: str) -> None:
        optimizer.engine.wait_for_refresh()
        before, places = owned(optimizer), pointers(optimizer)
        self.seen |= {term for term, nbytes in before.items() if nbytes}
        optimizer.offload_states()
        away = owned(optimizer)
        wanted = {term: nbytes if term in self._stays else 0 for term, nbytes in before.items()}
        self.wrong += [] if away == wanted else [f"{when}: {away} away, expected {wanted} of {before}"]
        optimizer.reload_states()
        before["gathered"] = 0
        self.wrong += [] if owned(optimizer) == before else [f"{when}: {owned(optimizer)} back, expected {before}"]
        self.wrong += [] if pointers(optimizer) == places else [f"{when}: other objects than before"]


def pointers(optimizer: zeropp.ZeroOptimizer) -> list[object]:
    """Return the object, class, storage and version of all states, slices, gradients, shards and gathered buffers."""
    states = [(p, *s.values()) for p, s in optimizer.inner.state.items()]
    tensors = [t for row in states for t in row if isinstance(t, torch.Tensor)]
    tensors += [t for part in optimizer.slices.all for t in (part.parameter, part.gradient)]
    tensors += [b.shard for b in optimizer.engine.buffers] + [b.flat for b in optimizer.engine.buffers]
    return [(id(t), type(t), t.untyped_storage()._cdata, t._version) for t in tensors]


def trained(settings: dict[str, Any], how: str, *, apart: bool) -> tuple[list[str], set[str]]:
    """Return the differences between training with and without pauses, and the kinds of memory that existed."""
    options = Run(settings, accumulation=2, how=how, steps=3)
    pauses = Pauses({"host"})
    with host_apart(apart):
        return [*same(run(options), run(replace(options, paused=pauses))), *pauses.wrong], pauses.seen


@pytest.mark.every(12)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ROWS)
def test_training_goes_on_as_if_nothing_had_happened(name: str, world: int, tmp_path: Path) -> None:
    """Results have the same bits, also with pauses in a window, and device memory is freed during each pause."""
    (settings, terms), apart = ROWS[name], "apart" in name
    # hpZ has secondary shards only with several nodes, so it runs on two nodes of two ranks. A single rank communicates
    # nothing and lacks some of the further kinds of memory, such as error feedback.
    ranks = 4 if world == 2 and "zero_hpz_partition_size" in settings else world
    here = {"host"} if apart else {"states", "main_weights", "gradients"}
    wanted = here | (terms if world == 2 else set())
    files = {key for key, block in settings.items() if isinstance(block, dict) and block.get("device") == "nvme"}
    settings = {**settings, **{key: {**settings[key], "nvme_path": str(tmp_path)} for key in files}}
    how = "no_sync" if name == "stage 0" else "backward"
    for wrong, seen in run_ranks(ranks, trained, settings, how, apart=apart, local_world_size=max(ranks // 2, 1)):
        assert not wrong
        assert wanted <= seen


def stepped(settings: dict[str, Any], optimizer: Any = torch.optim.AdamW, **options: Any) -> Any:
    """Return a model and its optimizer after a step, with gradients that have not been cleared."""
    torch.manual_seed(3)
    model = Routed(3)
    made = zeropp.ZeroOptimizer(optimizer(model.parameters(), lr=0.01, **options), model, make_config(**settings))
    model(rows()).square().mean().backward()
    made.step()
    return model, made


def rows() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5))


def refused(call: Callable[[], object]) -> str:
    """Return the text of a call's RuntimeError; "" if the call succeeds."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def forward(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        model(rows())


def edit(model: nn.Module, optimizer: Any) -> None:
    with zeropp.zero.GatheredParameters(model.parameters(), modifier_rank=0):
        pass


def unfrozen(model: nn.Module, optimizer: Any) -> None:
    model.blocks[0].requires_grad_(not model.blocks[0].lin.weight.requires_grad)
    model(rows())


def dropped_gradient(model: nn.Module, optimizer: Any) -> None:
    model.blocks[1].lin.weight.grad = None


def added_group(model: nn.Module, optimizer: Any) -> None:
    optimizer.add_param_group({"params": []})


def unscale(model: nn.Module, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def own_slice(optimizer: Any) -> nn.Parameter:
    found: nn.Parameter = optimizer.param_groups[0]["params"][0]
    return found


def apply_average(model: nn.Module, optimizer: Any) -> None:
    with optimizer.average.applied():
        pass


# By name: an operation, and the kinds of memory that it needs.
USES: dict[str, tuple[Callable[[nn.Module, Any], object], set[str]]] = {
    "forward": (forward, {"lp_params"}),
    "training forward": (lambda m, o: m(rows()), {"lp_params", "lp_grads", "carried_errors"}),
    "backward": (lambda m, o: o.kept.backward(), {"lp_params", "lp_grads", "carried_errors"}),
    "step": (lambda m, o: o.step(), ALL),
    "step(now)": (lambda m, o: o.step(now=True), ALL),
    "clip": (lambda m, o: o.clip_grad_norm_(1.0), ALL),
    "norms": (lambda m, o: o.grad_norms(), ALL),
    "state_dict": (lambda m, o: o.state_dict(), ALL),
    "load_state_dict": (lambda m, o: o.load_state_dict(o.before), ALL),
    "model.load_state_dict": (lambda m, o: m.load_state_dict({}), ALL),
    "save": (lambda m, o: zeropp.checkpoint.save("nowhere", m, o), ALL),
    "load": (lambda m, o: zeropp.checkpoint.load("nowhere", m, o), ALL),
    "dcp": (lambda m, o: zeropp.checkpoint.state(m, o).state_dict(), ALL),
    "edit": (edit, {"hp_params", "lp_params"}),
    "add_param_group": (added_group, ALL),
    "grad = None": (dropped_gradient, {"lp_grads", "lp_params", "carried_errors"}),
    "GradScaler": (unscale, {"lp_grads"}),
    "ema": (lambda m, o: zeropp.ema(m), ALL),
    "average": (apply_average, ALL),
    "average's update": (lambda m, o: o.average.update(), ALL),
    "state": (lambda m, o: o.state, {"optim_states"}),
    "inner state": (lambda m, o: o.inner.state[own_slice(o)]["exp_avg"].sum(), {"optim_states"}),
    "inner state, copied": (lambda m, o: copy.deepcopy(o.inner.state_dict()), {"optim_states"}),
    "inner state, printed": (lambda m, o: str(list(o.inner.state.values())), set()),
    "slice": (lambda m, o: own_slice(o).sum(), {SHARDS}),
    "norm of slices": (lambda m, o: torch._foreach_norm(o.param_groups[0]["params"]), {SHARDS}),
    "gradient": (lambda m, o: own_slice(o).grad.square(), {"lp_grads"}),  # type: ignore[union-attr]
    "torch's clipping": (lambda m, o: nn.utils.clip_grad_value_(o.param_groups[0]["params"], 1.0), {"lp_grads"}),
    "inner.zero_grad to zeros": (lambda m, o: o.inner.zero_grad(set_to_none=False), {"lp_grads"}),
    "full_state": (lambda m, o: zeropp.full_state(m), set()),
    "groups": (lambda m, o: [g["lr"] for g in o.param_groups], set()),
    "printed": (lambda m, o: f"{own_slice(o)} {own_slice(o).shape}", set()),
    "no_sync": (lambda m, o: o.no_sync().__enter__(), set()),
    "grad_norm": (lambda m, o: (o.grad_norm, o.skipped_steps), set()),
    "reports": (lambda m, o: (zeropp.comm_report(o), owned_bytes(o)), set()),
    "requires_grad": (unfrozen, ALL),  # last, because it changes which parameters are trained
}


# By name: settings, kinds of memory that exist with them, and the kind that slices belong to.
HELD: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "fp32": ({}, ["optim_states", "lp_params", "lp_grads"], "lp_params"),
    "cached": ({"persist": 1000, **BF16}, ["optim_states", "hp_params", "lp_params", "lp_grads"], "hp_params"),
    "coded": ({**CODED, **LOCO, **BF16}, ["carried_errors"], "lp_params"),
}


def used(name: str) -> list[str]:
    """Return texts on operations that succeeded without memory they need, and on operations refused without a need."""
    settings, kinds, shards = HELD[name]
    model, optimizer = stepped(settings)
    optimizer.average, optimizer.before = zeropp.ema(model), optimizer.state_dict()
    wrong = []
    for (which, (use, needs)), kind in product(USES.items(), kinds):
        optimizer.kept = model(rows()).square().mean()
        optimizer.offload_states([kind])
        told = refused(lambda: use(model, optimizer))  # noqa: B023 (called at once)
        if kind in needs or (kind == shards and SHARDS in needs):
            if f"({kind})" not in told or "call optimizer.reload_states() first" not in told:
                wrong.append(f"{which}, {kind} away: {told!r}")
        elif told:
            wrong.append(f"{which}, {kind} away, which is not needed: {told!r}")
        optimizer.reload_states()
        optimizer.zero_grad()
        # After reload_states(), training works again.
        model(rows()).square().mean().backward()
        optimizer.step()
    return wrong


@pytest.mark.every(4)
# A single rank sends no codec messages, so it has no error feedback.
@pytest.mark.parametrize(("name", "world"), [pair for pair in product(HELD, (1, 2)) if pair != ("coded", 1)])
def test_uses_of_offloaded_states_raise_with_the_remedy(name: str, world: int) -> None:
    """The error names the kind and the remedy. Without it, code would read empty memory and crash, or compute NaN."""
    assert run_ranks(world, used, name) == [[]] * world
