"""The miniature's four trainers on two processes under DDP, beside one process and beside runs without the layer."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from mini import FAMILIES, MINI, clean_environment, command_line, make_mini_inputs
from ranks import EXACT, LAYER, RankServer, layer
from safetensors.torch import load_file
from test_training_runs import assert_same_weights, weight_differences
from tolerances import TOLERANCES

from moss_tts_patches.engines.data_parallel import DataParallel
from moss_tts_patches.errors import EnvironmentProblem
from moss_tts_patches.memory import placement
from moss_tts_patches.units import GIB

SCRIPT = "{}/finetuning/sft.py"
RATE_STEPS = {"MOSS_LOWMEM_CORRECTIONS": "learning_rate_steps"}
# All 12 records are one window, whose gradient is the same whatever record meets which process.
WHOLE = ("--per-device-batch-size", "1", "--num-epochs", "3", "--adam-eps", "1e-6", "--max-grad-norm", "0.1")
WINDOW = {1: ("--gradient-accumulation-steps", "12"), 2: ("--gradient-accumulation-steps", "6")}
TWO_EPOCHS = ("--num-epochs", "2", "--warmup-ratio", "0", "--adam-eps", "1e-6")
# torchrun gives the other ranks 30 s after SIGTERM; gloo notices a lost peer at once.
SECONDS_TO_NOTICE = 45
LORA = {"MOSS_LOWMEM_METHOD": "lora", "MOSS_LOWMEM_LORA_DROPOUT": "0", "MOSS_LOWMEM_MERGE": "none"}


@pytest.fixture(scope="module")
def server():
    with RankServer() as running:
        yield running


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Each family's checkpoint and data; the folder's name is the key of transformers' cache of code."""
    root = tmp_path_factory.mktemp("inputs")
    return functools.cache(lambda family: make_mini_inputs(root / f"{family.replace('.', '_')}_ranks", family=family))


@pytest.fixture(scope="module")
def run(server, inputs, tmp_path_factory):
    """Trainings, each done once."""
    root = tmp_path_factory.mktemp("jobs")

    @functools.cache
    def training(family, processes=2, options=(), layer=(), check=True):
        output = root / f"{len(list(root.iterdir()))}"
        arguments = command_line(inputs(family), output, *options)
        return server.run(
            SCRIPT.format(family),
            arguments,
            output,
            folder=MINI,
            processes=processes,
            environment=dict(layer),
            check=check,
        )

    return training


# -- equality ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_weights_equal_the_trainers_own_two_processes(run, family):
    plain, ours = run(family, options=TWO_EPOCHS), run(family, options=TWO_EPOCHS, layer=layer(EXACT))
    assert len(plain.losses) == 4
    assert ours.losses == pytest.approx(plain.losses, abs=TOLERANCES["printed_loss_unit"])
    assert ours.rates == plain.rates
    assert ours.digests[0] == ours.digests[1]
    assert_same_weights(ours.weights(), plain.weights())


@pytest.mark.parametrize("method", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_train_like_one_with_twice_the_window(run, family, method):
    """Also that clipping sees the averaged gradients: it bites at a norm of 0.1."""
    one, two = (
        run(family, processes, (*WHOLE, *WINDOW[processes]), layer(EXACT, RATE_STEPS, method)) for processes in (1, 2)
    )
    name = "adapter_model.safetensors" if method else "model.safetensors"
    assert two.digests[0] == two.digests[1]
    assert two.rates == one.rates
    assert_same_weights(two.weights(name), one.weights(name))


def test_the_comparison_sees_a_gradient_that_was_not_averaged(run):
    """Negative control: half of the window is another gradient."""
    family = FAMILIES[0]
    whole = run(family, 1, (*WHOLE, *WINDOW[1]), layer(EXACT, RATE_STEPS))
    half = run(family, 1, (*WHOLE, *WINDOW[2]), layer(EXACT, RATE_STEPS))
    assert weight_differences(half.weights(), whole.weights())[1] > 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_8bit_states_and_stochastic_rounding_leave_ranks_equal(run, family):
    on_device = run(family, layer=layer(LAYER))
    on_host = run(family, layer=layer(LAYER, MOSS_LOWMEM_STATES="host"))
    assert len({*on_device.digests, *on_host.digests}) == 1
    assert "optimizer=adamw8bit" in on_device.outputs[0]


# -- what is said, and where ------------------------------------------------------------------------------------------


def test_one_process_speaks_and_the_schedule_is_chosen(run):
    done = run(FAMILIES[0], layer=layer(LAYER))
    assert "schedule=autograd instead_of=staged engine='DDP' reason='DDP averages" in done.outputs[0]
    assert "[lowmem]" not in done.outputs[1]
    assert {path.name for path in done.folder.iterdir()} == {"checkpoint-epoch-0", "lowmem_log.jsonl"}


def test_gradients_in_host_memory_are_refused_with_advice(run):
    done = run(FAMILIES[0], layer=layer(LAYER, MOSS_LOWMEM_GRADIENTS="host"), check=False)
    assert all(done.statuses)
    for output in done.outputs:
        assert "MOSS_LOWMEM_GRADIENTS=host: DDP keeps buckets of the gradients' size on every GPU" in output
        assert "Traceback" not in output


def test_optimizer_states_in_host_memory_have_to_fit_all_processes_of_the_machine(monkeypatch):
    """Four on two machines: two of them share the memory of each; nobody has taken any before all have looked."""
    met = []
    accelerator = SimpleNamespace(num_processes=4, ddp_handler=None, wait_for_everyone=lambda: met.append(True))
    monkeypatch.setattr(placement, "available_host_bytes", lambda: 2 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    DataParallel(accelerator).check_host_room(GIB)
    assert len(met) == 2
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(EnvironmentProblem, match=r"4.00 GiB of RAM .* \(4 processes with 1.00 GiB each\)"):
        DataParallel(accelerator).check_host_room(GIB)


# -- the learning rate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_learning_rate_takes_one_step_per_optimizer_step(run, family):
    options = ("--num-epochs", "2", "--lr-scheduler-type", "linear", "--warmup-ratio", "0")
    upstream = run(family, options=options, layer=layer(EXACT))
    corrected = run(family, options=options, layer=layer(EXACT, RATE_STEPS))
    right = [7.5e-4, 5e-4, 2.5e-4, 0.0]
    assert corrected.rates == right
    if family == "moss_tts_local_v1.5":  # upstream steps this family's by hand
        assert upstream.rates == right
    else:
        assert upstream.rates == [5e-4, 0.0, 0.0, 0.0]
        assert "correction=learning_rate_steps" in corrected.outputs[0]
    assert "correction=learning_rate_steps" not in upstream.outputs[0]


# -- a head without labels --------------------------------------------------------------------------------------------


def test_a_binary_text_head_without_labels_does_not_hang(server, inputs, tmp_path):
    """The trainer alone fails here: its reducer waits for a gradient that never comes."""
    family = "moss_tts_local_v1.5"
    trainer = _with_unlabelled_text(tmp_path / "trainer", MINI)

    def train(environment, name):
        return server.run(
            SCRIPT.format(family),
            command_line(inputs(family), tmp_path / name),
            tmp_path / name,
            folder=trainer,
            environment=environment,
            check=False,
        )

    ours, plain = train(LAYER, "ours"), train({}, "plain")
    assert list(ours.statuses) == [0, 0], ours.outputs
    assert ours.digests[0] == ours.digests[1]
    assert any(plain.statuses)


# One rank finds its loss not finite. `checks` stands for the run without --skip-nonfinite-batches, where the layer
# looks at the gradients that all ranks share, and no rank is to leave its batch out on its own.
BAD_LOSS = """
import sys, types, torch, torch.distributed as dist
from moss_tts_patches.families.local_v15_patches import agreed_finite
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
loss = torch.tensor(float("nan") if rank else 1.0)
for checks in (False, True):
    asked = agreed_finite(types.SimpleNamespace(checks_gradients=checks), lambda value: bool(value.isfinite()))
    print(asked(loss), flush=True)
dist.barrier()
"""


def test_one_rank_with_a_bad_loss_does_not_leave_the_other_waiting(tmp_path):
    """v1.5 looks at each loss, and skips a batch on its own; the other rank would wait in its backward for ever."""
    command = [sys.executable, "-c", BAD_LOSS]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0].split() for rank in ranks] == [["False", "True"]] * 2


def test_the_longest_records_of_each_rank_change_nothing(run):
    """Every micro-batch ends in an exchange of gradients here; those of the trial meet nobody."""
    options = ("--gradient-accumulation-steps", "1")
    for family in ("moss_tts_local", "moss_tts_local_v1.5"):
        tried, untried = (
            run(family, options=options, layer=layer(EXACT, MOSS_LOWMEM_LONGEST_FIRST=first)) for first in "10"
        )
        assert "longest" in tried.outputs[0] and len({*tried.digests, *untried.digests}) == 1


def _with_unlabelled_text(folder: Path, trainer: Path) -> Path:
    """A copy of the miniature whose batches have no text label."""
    unlabelled = (
        "_collate = MossTTSLocalV15SFTDataset.collate_fn\n\n\n"
        "def collate_fn(self, records):\n"
        "    batch = _collate(self, records)\n"
        '    batch["labels"][..., 0] = -100\n'
        "    return batch\n\n\n"
        "MossTTSLocalV15SFTDataset.collate_fn = collate_fn\n\n\n"
    )
    return _with_code(folder, trainer, unlabelled)


def _with_code(folder: Path, trainer: Path, code: str) -> Path:
    """A copy of the miniature whose v1.5 trainer has ``code`` before it starts."""
    shutil.copytree(trainer, folder, ignore=shutil.ignore_patterns("__pycache__"))
    script = folder / "moss_tts_local_v1.5" / "finetuning" / "sft.py"
    text = script.read_text(encoding="utf-8")
    assert text.count('if __name__ == "__main__":') == 1
    script.write_text(text.replace('if __name__ == "__main__":', code + 'if __name__ == "__main__":'), encoding="utf-8")
    return folder


# -- torchrun ---------------------------------------------------------------------------------------------------------


def test_a_killed_rank_ends_the_job_with_a_message(inputs, tmp_path):
    """Under torchrun and the layer's supervisor, as run_train_lowmem.sh starts them."""
    family, output = FAMILIES[0], tmp_path / "output"
    command = [
        sys.executable,
        *("-m", "moss_tts_patches.launch.supervise", sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
        SCRIPT.format(family),
        *command_line(inputs(family), output, "--num-epochs", "10000"),
    ]
    log = tmp_path / "log"
    with open(log, "w") as file:
        job = subprocess.Popen(
            command,
            cwd=MINI,
            env=clean_environment(**LAYER, ACCELERATE_USE_CPU="true"),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        victim = _rank_that_trains(job.pid, log)
        victim.kill()
        started = time.monotonic()
        status = job.wait(timeout=60)
        seconds = time.monotonic() - started
    finally:
        for process in [*psutil.Process(job.pid).children(recursive=True)] if job.poll() is None else ():
            process.kill()
        job.kill() if job.poll() is None else None
    text = log.read_text(encoding="utf-8")
    assert status != 0, text
    assert seconds < SECONDS_TO_NOTICE, text
    assert f"exitcode  : -9 (pid: {victim.pid})" in text  # torchrun's own words
    assert f"[lowmem] Last readings of the training process {victim.pid}" in text


def _rank_that_trains(job: int, log: Path) -> psutil.Process:
    """Waits for the first step, and returns rank 1's process."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if " step=1/" in log.read_text(encoding="utf-8"):
            for process in psutil.Process(job).children(recursive=True):
                if process.environ().get("RANK") == "1":
                    return process
        time.sleep(0.2)
    raise AssertionError(log.read_text(encoding="utf-8"))


def test_saved_adapters_of_two_processes_are_whole(run):
    done = run(FAMILIES[0], 2, (*WHOLE, *WINDOW[2]), layer(EXACT, RATE_STEPS, LORA))
    folders = sorted(path.name for path in done.folder.iterdir() if path.is_dir())
    assert folders == ["checkpoint-epoch-0", "checkpoint-epoch-1", "checkpoint-epoch-2"]
    adapters = load_file(done.folder / folders[-1] / "adapter_model.safetensors")
    assert adapters and all(tensor.abs().sum() > 0 for tensor in adapters.values())


def test_weights_are_written_by_one_process(run):
    """The control is the trainer without the layer: both processes write the same file."""
    plain, ours = run(FAMILIES[0], options=TWO_EPOCHS), run(FAMILIES[0], options=TWO_EPOCHS, layer=layer(EXACT))
    assert (plain.writers, ours.writers) == ({"0", "1"}, {"0"})
