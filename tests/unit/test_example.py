"""Parts of the training example: text, batches, model, generation, schedule, configuration and signals."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
import train_gpt
from gpt import GPT, GPTConfig, generate, parameter_count
from job import Job, Metrics
from text_data import Batches, list_files, load_text, standard_library, validation_batches

import zeropp

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

TINY = GPTConfig(layers=2, d_model=32, heads=2, seq_len=16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of 39 text files, each with its number repeated as content, a hidden file and a bytecode file."""
    for i in range(39):
        (tmp_path / f"{i:02}.txt").write_text(f"<{i:02}>" * 50)
    (tmp_path / ".secret").write_text("!" * 50)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("!" * 50)
    return tmp_path


# -- Text.


def test_whole_files_are_held_out(folder: Path) -> None:
    text = load_text([folder], holdout_every=10)
    train, held_out = bytes(text.train).decode(), bytes(text.validation).decode()
    assert text.files == 39
    for i in range(39):
        assert (f"<{i:02}>" in held_out) == (i % 10 == 9)
        assert (f"<{i:02}>" in train) == (i % 10 != 9)
    assert "!" not in train + held_out


def test_order_is_that_of_names(folder: Path) -> None:
    assert [path.name for path in list_files([folder])] == sorted(f"{i:02}.txt" for i in range(39))
    given = [folder / "07.txt", folder / "03.txt"]
    assert list_files(given) == given


def test_one_file_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_bytes(bytes(range(100)))
    text = load_text([path], holdout_every=10)
    assert bytes(text.train) + bytes(text.validation) == bytes(range(100)) + b"\n\n"
    assert text.validation.numel() == 10


def test_the_standard_library_is_the_default() -> None:
    files = list_files()
    names = [path.relative_to(standard_library()).as_posix() for path in files]
    assert "argparse.py" in names and "json/decoder.py" in names
    assert names == sorted(names)
    assert not any(name.startswith(("test/", "site-packages/")) for name in names)


def test_missing_and_empty_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a file or a directory"):
        load_text([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="no text found"):
        load_text([tmp_path])
    with pytest.raises(ValueError, match="too few for windows of 100"):
        Batches(torch.zeros(100, dtype=torch.uint8), batch=1, seq_len=100)


# -- Batches.


def numbered(n: int = 251) -> torch.Tensor:
    return torch.arange(n, dtype=torch.uint8)


def test_targets_are_the_next_bytes() -> None:
    x, y = Batches(numbered(), batch=4, seq_len=8).at(0)
    assert x.shape == y.shape == (4, 8)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x + 1, y)
    assert torch.equal(x, x[:, :1] + torch.arange(8))


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    batches = Batches(numbered(), batch=4, seq_len=8, seed=3)
    first = batches.at(5)[0]
    batches.at(6)
    assert torch.equal(batches.at(5)[0], first)
    assert torch.equal(Batches(numbered(), batch=4, seq_len=8, seed=3).at(5)[0], first)
    assert not torch.equal(batches.at(6)[0], first)
    assert not torch.equal(Batches(numbered(), batch=4, seq_len=8, seed=4).at(5)[0], first)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_divide_one_global_batch(world: int) -> None:
    alone = Batches(numbered(), batch=8, seq_len=8).starts(7)
    parts = [Batches(numbered(), 8 // world, 8, rank, world).starts(7) for rank in range(world)]
    halves = [Batches(numbered(), 4, 8, accumulate=2).starts(7, micro) for micro in range(2)]
    assert torch.equal(torch.cat(halves), alone)
    assert torch.equal(torch.cat(parts), alone)
    assert len({tuple(part.tolist()) for part in parts}) == world


@pytest.mark.parametrize("world", [1, 2, 3])
def test_validation_is_divided_evenly(world: int) -> None:
    per_rank = [list(validation_batches(numbered(), 2, 8, 10, rank, world)) for rank in range(world)]
    assert len({len(batches) for batches in per_rank}) == 1, "all ranks must call forward the same number of times"
    starts = [int(row[0]) for batches in per_rank for x, _ in batches for row in x]
    assert len(starts) == math.ceil(10 / (2 * world)) * 2 * world
    assert min(starts) == 0 and max(starts) == 251 - 8 - 1


# -- Model.


def test_forward_gives_logits_or_the_loss() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    x, y = torch.randint(256, (2, 2, 16))
    logits = model(x)
    assert logits.shape == (2, 16, 256)
    expected = -torch.log_softmax(logits, -1).gather(-1, y[..., None]).mean()
    torch.testing.assert_close(model(x, y), expected)
    assert abs(expected.item() - math.log(256)) < 0.3, "a new model must give nearly uniform probabilities"


def test_attention_is_causal() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    x = torch.randint(256, (1, 16))
    changed = x.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted(tied: bool) -> None:
    config = GPTConfig(layers=2, d_model=32, heads=2, tied=tied)
    assert sum(p.numel() for p in GPT(config).parameters()) == parameter_count(config)


def test_the_default_has_ten_million() -> None:
    assert round(parameter_count(GPTConfig()) / 1e6) == 11


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="heads=5"):
        GPTConfig(d_model=384, heads=5)
    with pytest.raises(ValueError, match="at least 1"):
        GPTConfig(layers=0)
    with pytest.raises(ValueError, match="built for 16"):
        GPT(TINY)(torch.zeros(1, 17, dtype=torch.long))


def test_it_learns_a_pattern() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = Batches(torch.frombuffer(bytearray(b"abcdefgh" * 50), dtype=torch.uint8), batch=8, seq_len=16)
    for step in range(40):
        optimizer.zero_grad()
        loss = model(*batches.at(step))
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5
    written = bytes(generate(model, torch.tensor(list(b"abc")), 24, TINY.seq_len, temperature=0.1))
    assert written == b"defghabc" * 3, "the text is longer than the context, so the context window must slide"


# -- Generation.


def test_generation_repeats_with_its_seed() -> None:
    torch.manual_seed(0)
    model = GPT(TINY).train()
    prompt = torch.tensor(list(b"x"))
    first = list(generate(model, prompt, 20, TINY.seq_len, seed=1))
    assert len(first) == 20 and all(0 <= token < 256 for token in first)
    assert list(generate(model, prompt, 20, TINY.seq_len, seed=1)) == first
    assert list(generate(model, prompt, 20, TINY.seq_len, seed=2)) != first
    assert model.training, "generate() must restore the training mode"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        next(generate(GPT(TINY), torch.empty(0, dtype=torch.long), 1, 16))


# -- Training script.


def test_learning_rate() -> None:
    factors = [train_gpt.learning_rate_factor(step, steps=100, warmup=10) for step in range(101)]
    assert factors[:2] == [0.1, 0.2]
    assert max(factors) == factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100] == pytest.approx(0.1)


def made(args: argparse.Namespace, job: Job) -> zeropp.Config:
    return train_gpt.make_config(train_gpt.read_config(args), args, job)


def test_flags_add_to_the_config_file(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text('{"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5} // a comment')
    job = Job(0, 1, torch.device("cpu"))
    arguments = ["--config", str(path)]
    assert made(train_gpt.parse_arguments(arguments), job) == zeropp.load_config(path)
    arguments += ["--bf16", "--accumulate", "4"]
    config = made(train_gpt.parse_arguments(arguments), job)
    assert config.bf16.enabled
    assert config.gradient_accumulation_steps == 4
    assert config.gradient_clipping == 0.5


def test_batch_and_accumulation_follow_the_config_file(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text('{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}')
    job = Job(0, 2, torch.device("cpu"))
    job.agree = lambda value=0.0: (False, value)  # type: ignore[method-assign]  # no other rank is here
    for flags in ([], ["--batch", "2"]):
        args = train_gpt.parse_arguments(["--config", str(path), *flags])
        made(args, job)
        assert (args.batch, args.accumulate) == (2, 4)
    with pytest.raises(ValueError, match="--batch 3"):
        made(train_gpt.parse_arguments(["--config", str(path), "--batch", "3"]), job)


@pytest.mark.parametrize("flags", [["--log-every", "0"], ["--prompt", ""], ["--batch", "-1"]])
def test_flags_that_cannot_work_are_refused_at_once(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        train_gpt.parse_arguments(flags)


def test_without_a_file_the_faster_dtype_is_chosen() -> None:
    config = made(train_gpt.parse_arguments([]), Job(0, 1, torch.device("cpu")))
    assert config.zero.stage == 3
    assert config.bf16.enabled in (True, False)


def test_metrics_are_on_disk_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    metrics = Metrics(path, Job(0, 2, torch.device("cpu")))
    metrics.write("train", step=1, loss=2.5)
    assert json.loads(path.read_text()) == {"event": "train", "step": 1, "loss": 2.5}
    metrics.close()
    Metrics(tmp_path / "other", Job(1, 2, torch.device("cpu"))).write("train", step=1)
    assert not (tmp_path / "other").exists(), "only rank 0 writes"


def test_a_signal_asks_once() -> None:
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    job = Job(0, 1, torch.device("cpu"))
    try:
        job.install_signals()
        assert job.agree(1.5) == (False, 1.5)
        os.kill(os.getpid(), signal.SIGINT)
        assert job.agree(1.5) == (True, 1.5)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL, "a second signal must end the process at once"
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
