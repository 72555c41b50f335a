"""transformers' ``Trainer`` with a ZeRO-3 JSON full of "auto" on two ranks agrees with one process of plain torch.

Both runs are separate programs (`trainer_job`), because transformers looks for deepspeed once, when it is imported.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zeropp.compat.deepspeed import environment

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

CLASSES = {
    "decoder": "LlamaForCausalLM", "encoder": "BertForMaskedLM", "encoder-decoder": "T5ForConditionalGeneration",
    "vision": "ViTForImageClassification", "experts": "MixtralForCausalLM",
}  # fmt: skip
KINDS = [*CLASSES, "resume", "again", "lora"]
ROOT = Path(__file__).resolve().parents[3]
EXACT = 2e-6  # relative bound in float32; the order of sums over ranks differs


def started_ranks(command: list[str], env: dict[str, str]) -> list[tuple[list[str], dict[str, str]]]:
    """Return (command, environment) for each of two ranks, as torchrun under the stand-in would start them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**env, "PYTHONPATH": f"{environment()['PYTHONPATH']}:{env['PYTHONPATH']}", "WORLD_SIZE": "2"}
    shared |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [(command, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]


def both(
    folder: Path, kinds: list[str], job: str = "trainer_job", launcher: bool = True
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a job in one process of plain torch and on two ranks under the stand-in.

    Args:
        folder: folder for results and logs.
        kinds: trainings to run, as arguments of the job.
        job: module in tests.support.
        launcher: True to use the stand-in's command and torchrun, False to start the ranks directly.

    Returns:
        Results of the plain process, and results of each rank.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "HF_HUB_OFFLINE": "1"}
    module = ["-m", f"tests.support.{job}", str(folder), *kinds]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *module]
    commands = [([sys.executable, *module], env)]
    if launcher:
        commands += [([sys.executable, "-m", "zeropp.compat.deepspeed", sys.executable, *torchrun], env)]
    else:
        commands += started_ranks([sys.executable, *module], env)
    logs = [(folder / f"{number}.log").open("w+") for number in range(len(commands))]
    running = [
        subprocess.Popen(command, env=own, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        for (command, own), log in zip(commands, logs, strict=True)
    ]
    for process, log in zip(running, logs, strict=True):
        code = process.wait(600)
        log.seek(0)
        assert code == 0, log.read()[-6000:]
        log.close()
    read = [json.loads((folder / f"{name}.json").read_text()) for name in ("plain", "0", "1")]
    return read[0], read[1:]


def loaded(kind: str, folder: Path) -> nn.Module:
    """Return the model that plain transformers loads from a folder."""
    model: nn.Module = getattr(transformers, CLASSES[kind]).from_pretrained(folder / "final")
    return model


def compare(folder: Path, kinds: list[str], bound: float = EXACT, launcher: bool = True) -> None:
    plain, ranks = both(folder, kinds, launcher=launcher)
    for kind in kinds:
        name, _, how = kind.partition(":")
        wanted = plain[kind]
        if name == "resume":
            assert len(wanted["second"]) == 4 and len(wanted["first"]) == 2
            # The resumed run restores the log of the first part, and appends to it.
            assert ranks[0][kind]["second"] == pytest.approx(wanted["second"], rel=bound), kind
            continue
        assert wanted["loss"][-1] != wanted["loss"][0] and len(wanted["loss"]) == 4
        for key, values in wanted.items():
            if key == "generated":
                assert all(rank[kind][key] == values for rank in ranks), kind
            else:
                assert ranks[0][kind][key] == pytest.approx(values, rel=bound if key != "grad_norm" else 10 * bound), (
                    kind
                )
        if name in CLASSES:
            place = folder / how
            states = [loaded(name, place / f"{name}-{run}").state_dict() for run in ("plain", "ranks")]
            assert states[0].keys() == states[1].keys()
            for key, value in states[0].items():
                assert torch.allclose(states[1][key], value, rtol=0, atol=20 * bound), (kind, key)


@pytest.mark.timeout(300)
def test_trainer_trains_a_decoder_as_one_process(tmp_path: Path) -> None:
    """Losses, norms, evaluation, generation from sharded weights, and the file of ``save_model`` agree."""
    compare(tmp_path, ["decoder"], launcher=False)


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_trainer_trains_as_one_process(tmp_path: Path) -> None:
    """All kinds of models agree, and so do a resumed run, one model in three Trainers, and LoRA.

    Compared are losses, norms, evaluation, generation from sharded weights, and the file of ``save_model``.
    """
    compare(tmp_path, KINDS)
    adapters = tmp_path / "lora-ranks" / "final" / "adapter_model.safetensors"
    from safetensors.torch import load_file

    found, wanted = load_file(adapters), load_file(tmp_path / "lora-plain" / "final" / "adapter_model.safetensors")
    assert found.keys() == wanted.keys() and all("lora_" in name or "lm_head" in name for name in found)
    assert any("lm_head" in name for name in found)
    assert all(torch.allclose(found[name], wanted[name], rtol=0, atol=20 * EXACT) for name in found)
    # Each rank has written its own part into the folder that transformers looks for.
    assert (tmp_path / "decoder-resumed-ranks" / "checkpoint-2" / "global_step2").is_dir()


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["1", "2", "cpu"])
def test_other_stages_and_offload(how: str, tmp_path: Path) -> None:
    (tmp_path / how).mkdir()
    compare(tmp_path, [f"{kind}:{how}" for kind in (*CLASSES, "lora")])


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", ["1", "2"])
def test_a_batch_size_that_is_found(stage: str, tmp_path: Path) -> None:
    """Accelerate destroys the engine whose batch was too large, and gives the model to the next engine."""
    (tmp_path / stage).mkdir()
    compare(tmp_path, [f"short:{stage}"])


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_bfloat16(tmp_path: Path) -> None:
    """Losses agree to 2 % only.

    Main weights are float32, but the plain process computes under autocast, which rounds at other places.
    """
    if torch.cuda.device_count() < 2:
        pytest.skip("transformers refuses bf16 without GPUs, and this takes two")
    (tmp_path / "bf16").mkdir()
    plain, ranks = both(tmp_path, ["encoder:bf16", "vision:bf16"])
    for kind, wanted in plain.items():
        assert ranks[0][kind]["loss"] == pytest.approx(wanted["loss"], rel=0.02)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_trl(tmp_path: Path) -> None:
    """TRL's trainers agree, if TRL is installed. The test environment does not include TRL."""
    pytest.importorskip("trl", reason="trl is not installed")
    plain, ranks = both(tmp_path, [], job="trl_job")
    for kind in ("sft", "dpo"):
        assert ranks[0][kind] == pytest.approx(plain[kind], rel=2e-4) and plain[kind][-1] < plain[kind][0]
    assert len(ranks[0]["grpo"]) == 6 and all(0 < reward <= 1 for reward in ranks[0]["grpo"])
