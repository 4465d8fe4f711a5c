"""The parts of validation by themselves: the loss over many batches, one pass, the best weights, held out records."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_families import SMALL
from small_models import Ours, speech_batch, tiny_model
from test_data_check import SPEECH, speech, upstream_loader, write
from tolerances import TOLERANCES
from torch import nn

from moss_tts_patches.data.check import UpperBounds
from moss_tts_patches.data.held_out import load_files, take_share
from moss_tts_patches.data.install import DataOptions, load_checked
from moss_tts_patches.errors import DataError, SeamError, SettingsError
from moss_tts_patches.families.local import LocalFamily
from moss_tts_patches.loss.engine import EngineOptions, LossEngine
from moss_tts_patches.loss.loss_sums import LossSums
from moss_tts_patches.loss.module_schedule import ByModule
from moss_tts_patches.memory.tracker import StorageTracker
from moss_tts_patches.optim.gradients import DeviceGradients
from moss_tts_patches.runtime.checkpointing import checkpoint_layers
from moss_tts_patches.runtime.disk_need import whole_checkpoints
from moss_tts_patches.runtime.validation import best
from moss_tts_patches.runtime.validation.best import BestCheckpoint, check_signature
from moss_tts_patches.runtime.validation.course import Surrounding, Validation
from moss_tts_patches.runtime.validation.evaluation import CallForm, Evaluation, Result, evaluation_mode, make_batches
from moss_tts_patches.settings import Settings, load_settings

ALONE = types.SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))
FAMILIES = ("moss_tts_local", *SMALL)


def rows(batch: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    return {name: v[start:end] if isinstance(v, torch.Tensor) else v for name, v in batch.items()}


class Case:
    """A family's small model with dropout in it, and a batch of records of which the last has few labels."""

    def __init__(self, name: str) -> None:
        if name == "moss_tts_local":
            self.family, self.model, self.batch = LocalFamily(), tiny_model(), speech_batch(12, batch=4)
            self.loss_of_trainer = lambda model, **batch: model(**batch).loss
        else:
            small = SMALL[name]
            self.family, self.model, self.loss_of_trainer = small.family, small.model(), small.loss
            parts = [small.batch(seed) for seed in (1, 2)]
            self.batch = {
                key: torch.cat([part[key] for part in parts]) if isinstance(value, torch.Tensor) else value
                for key, value in parts[0].items()
            }
        supervised = (self.batch["labels"][3] != -100).any(dim=1).nonzero().squeeze(1)
        self.batch["labels"][3, supervised[:-4]] = -100
        self.family.backbone(self.model).norm.register_forward_hook(
            lambda module, _, output: torch.dropout(output, 0.5, module.training)
        )

    def upstream_loss(self, batch: dict[str, Any]) -> float:
        """The trainer's own, in the mode in which the model is."""
        with torch.no_grad():
            return self.loss_of_trainer(self.model, **batch).item()

    def evaluation(self, batch_size: int, accelerator: Any = ALONE, schedule: str = "staged") -> Evaluation:
        held = Records([rows(self.batch, index, index + 1) for index in range(4)])
        batches = make_batches(held, collate, held.records, batch_size, of_all=True, accelerator=accelerator)
        context = Ours(schedule, family=self.family).context
        diverted: list[Any] = []

        def divert(function: Any) -> Any:
            diverted[:] = [function]
            return evaluation_mode(nn.Identity())  # any context

        # The trainer's loss leads to what the forward is diverted to, as the patched forward of the model does.
        return Evaluation(
            self.family,
            lambda model, **batch: diverted[0](model, batch).loss,
            self.model,
            context,
            batches,
            accelerator,
            divert,
        )

    @property
    def form(self) -> CallForm:
        return CallForm.of(self.batch)


class Records:
    """A data set that draws from every generator, as augmentation would."""

    def __init__(self, records: list[Any]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        random.random(), np.random.rand(), torch.rand(1)
        return self.records[index]


def collate(records: list[Any]) -> dict[str, torch.Tensor]:
    names = [name for name, value in records[0].items() if isinstance(value, torch.Tensor)]
    return {name: torch.cat([record[name] for record in records]) for name in names}


# -- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_is_the_trainers_own_of_all_records_in_one_batch_in_evaluation_mode(name):
    case = Case(name)
    with evaluation_mode(case.model):
        expected = case.upstream_loss(case.batch)
        singles = [case.upstream_loss(rows(case.batch, index, index + 1)) for index in range(4)]
    found = [case.evaluation(size).run(case.form) for size in (4, 3, 1)]
    for result in found:
        assert result.loss == pytest.approx(expected, rel=TOLERANCES["loss_fp32_relative"])
        assert result.records == 4
        assert result.by_codebook == pytest.approx(found[0].by_codebook, rel=TOLERANCES["loss_fp32_relative"])
    # Negative controls: training mode has dropout, and a mean of batches' losses is another number.
    torch.manual_seed(0)
    assert abs(case.upstream_loss(case.batch) / expected - 1) > 100 * TOLERANCES["loss_fp32_relative"]
    assert abs(sum(singles) / 4 / expected - 1) > 10 * TOLERANCES["loss_fp32_relative"]


@pytest.mark.parametrize("name", ["moss_tts_local", "moss_tts_local_v1.5"])
def test_a_channel_without_labels_in_one_batch_counts_as_in_one_batch_of_all(name):
    case = Case(name)
    case.batch["labels"][3, :, 0] = -100
    with evaluation_mode(case.model):
        expected = case.upstream_loss(case.batch)
    assert case.evaluation(1).run(case.form).loss == pytest.approx(expected, rel=TOLERANCES["loss_fp32_relative"])


def test_without_any_label_the_loss_is_nan():
    assert math.isnan(LossSums().loss())


def test_a_loss_through_modules_alone_has_the_same_sums_and_no_graph():
    """For engines that split weights: the way without gradients is another one there."""
    model, batch = tiny_model().eval(), speech_batch(9)
    found = {}
    for by_module in (None, ByModule()):
        sums = LossSums()
        seen = []

        def observe(problem, values, seen=seen, sums=sums):
            seen.append(values)
            sums.add(problem, values)

        ours = Ours("autograd")
        ours.context.engine = LossEngine(
            EngineOptions("autograd", 7, by_module=by_module), DeviceGradients(), observe=observe
        )
        with torch.no_grad():
            output = ours.loss(model, batch)
        assert not output.requires_grad and not seen[0].requires_grad
        found[by_module is None] = sums.loss()
    assert found[True] == pytest.approx(found[False], rel=TOLERANCES["loss_fp32_relative"])


# -- a pass -----------------------------------------------------------------------------------------------------------


def test_generators_and_modes_are_as_before():
    case = Case("moss_tts_local")
    backbone = case.family.backbone(case.model)
    backbone.layers[1].eval()  # frozen by somebody
    modes = [module.training for module in case.model.modules()]
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    case.evaluation(2).run(case.form)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == before
    assert [module.training for module in case.model.modules()] == modes and len(set(modes)) == 2
    # Negative control: the data set does draw.
    collate([Records([case.batch])[0]])
    assert random.getstate() != before[0] and torch.get_rng_state().tolist() != before[2]


def test_gradients_in_the_store_stay(tmp_path):
    case = Case("moss_tts_local")
    ours = Ours("staged")
    ours.train(case.model, [case.batch])
    before = {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}
    case.evaluation(2).run(case.form)
    assert before and all(torch.equal(case.model.get_parameter(name).grad, grad) for name, grad in before.items())


@pytest.mark.parametrize("schedule", ["fused", "staged"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_peak_is_below_that_of_the_leanest_training(name, schedule):
    """By bytes of live tensors. One weight is trained, layers are recomputed: what is left are activations."""
    case = Case(name)
    backbone = case.family.backbone(case.model)
    case.model.requires_grad_(False)
    next(backbone.layers[0].parameters()).requires_grad_(True)
    checkpoint_layers(backbone)
    ours = Ours(schedule, family=case.family)
    evaluation = case.evaluation(4, schedule=schedule)

    def peak(run: Any) -> int:
        with StorageTracker() as tracker:
            tracker.watch(case.model.parameters(), "weights")
            tracker.reset_peak()
            run()
            return tracker.peak_bytes

    training = peak(lambda: ours.train(case.model, [case.batch]))
    evaluating = peak(lambda: evaluation.run(case.form))
    with evaluation_mode(case.model):
        plain = peak(lambda: case.upstream_loss(case.batch))
    assert evaluating < training
    assert evaluating < plain  # negative control: the trainer's own forward without gradients needs more


@pytest.mark.parametrize("records,size,processes", [(5, 2, 2), (1, 2, 3), (6, 1, 2), (4, 4, 1)])
def test_every_record_counts_once_and_every_process_makes_as_many_forwards(monkeypatch, records, size, processes):
    most = math.ceil(math.ceil(records / size) / processes)
    monkeypatch.setattr("moss_tts_patches.runtime.validation.evaluation.largest_of_all", lambda *_: most)
    counted, lengths = [], set()
    for rank in range(processes):
        accelerator = types.SimpleNamespace(num_processes=processes, process_index=rank, device=None)
        made = make_batches(Records([]), list, range(records), size, of_all=True, accelerator=accelerator)
        batches = list(made)
        lengths.add(len(batches))
        counted += [record for batch, counts in batches if counts for record in batch]
        assert made.records == sum(len(batch) for batch, counts in batches if counts)
    assert sorted(counted) == list(range(records)) and lengths == {most}


def test_a_data_set_that_keeps_its_records_elsewhere_is_refused():
    class Elsewhere:
        def __len__(self) -> int:
            return 3

    with pytest.raises(SeamError, match=r"seam Elsewhere.records: the data set does not hold its records there"):
        make_batches(Elsewhere(), list, [1], 1, of_all=True, accelerator=ALONE)


# -- when -------------------------------------------------------------------------------------------------------------


class Run:
    """A run whose validation losses are given, that notes what happens."""

    def __init__(self, losses: list[float], every: int = 1, saves: bool = True, records: str = "a") -> None:
        self.losses, self.events, self.lines = losses, [], []
        self.first: list[int] = []
        self.steps = 0
        self.stops = False
        self.validation = Validation(every, self.lines.append)
        self.evaluation = types.SimpleNamespace(run=self._evaluate)
        self.best = types.SimpleNamespace(write=self._write, stands=lambda: True)
        self.saves, self.form = saves, CallForm(("labels",), {"weights": [1.0]})
        self.validation.begins(
            Surrounding(
                self.evaluation,
                self.best,
                call_form=lambda: self.form,
                position=lambda: (self.steps, 1),
                stopping=lambda: self.stops,
                record=lambda values: self.events.append(("line", values["step"], values["valid_loss"])),
                left_out=lambda seconds: None,
                records=records,
                goes_on=records != "a",
            )
        )

    def _evaluate(self, form: Any, given_up: Any) -> Any:
        if given_up():
            return None
        self.events.append(("evaluated", self.steps))
        return Result(self.losses[self.steps - 1], {}, 1)

    def _write(self, step: int, epoch: int, loss: float, *, is_first: bool) -> bool:
        self.events.append(("saved", step))
        if is_first:
            self.first.append(step)
        return self.saves

    def to(self, steps: int) -> Run:
        while self.steps < steps:
            self.steps += 1
            self.validation.step_done(self.steps)
        return self

    def kinds(self, kind: str) -> list[int]:
        return [event[1] for event in self.events if event[0] == kind]


def test_the_lowest_is_saved_and_nothing_else():
    run = Run([3.0, 2.0, float("nan"), 2.5, 2.0, 1.0]).to(6)
    assert run.kinds("saved") == [1, 2, 6]
    assert (run.validation.best_loss, run.validation.best_step) == (1.0, 6)
    assert "not finite" in "\n".join(run.lines) and run.kinds("line") == [1, 2, 3, 4, 5, 6]


def test_every_so_many_steps_and_before_each_checkpoint_once():
    run = Run([3.0] * 6, every=2).to(5)
    assert run.kinds("evaluated") == [2, 4]
    save = run.validation.before_checkpoint(lambda: run.events.append(("checkpoint", run.steps)))
    save(), save()
    assert run.events[-3:] == [("line", 5, 3.0), ("checkpoint", 5), ("checkpoint", 5)]
    run.to(6)
    save()
    assert run.kinds("evaluated") == [2, 4, 5, 6]
    assert Run([3.0] * 4, every=0).to(4).events == []


def test_weights_that_could_not_be_saved_are_not_the_best():
    run = Run([3.0, 3.5], saves=False).to(2)
    assert run.kinds("saved") == [1, 2] and run.validation.best_step == 0


def test_a_resumed_run_decides_as_if_it_had_not_been_interrupted():
    losses = [3.0, 1.0, 2.0, 2.5, 0.5]
    whole = Run(losses).to(5)
    for stopped_at in range(1, 5):
        first = Run(losses).to(stopped_at)
        again, values = Run(losses), json.loads(json.dumps(first.validation.values()))
        again.steps = stopped_at
        again.validation.restore(values)
        again.validation.step_done(stopped_at)  # as ResumableRun does: it was evaluated
        again.to(5)
        assert first.events + again.events == whole.events
    # Negative control: a run that does not know what was takes the first that it sees for the best.
    unknowing = Run(losses)
    unknowing.steps = 2
    assert unknowing.to(4).kinds("saved") == [3]


def test_a_signal_before_an_evaluation_leaves_it_to_the_resumed_run():
    losses = [3.0, 1.0, 2.0]
    first = Run(losses).to(1)
    first.stops = True
    first.to(2)
    assert first.kinds("evaluated") == [1]
    again = Run(losses)
    again.steps, again.form = 2, None
    again.validation.restore(json.loads(json.dumps(first.validation.values())))
    again.validation.step_done(2)
    assert again.events == [("evaluated", 2), ("line", 2, 1.0), ("saved", 2)]


def test_best_weights_of_a_point_that_are_not_there_are_mentioned():
    run = Run([1.0])
    run.best.stands = lambda: False
    run.validation.restore({**Run([1.0]).to(1).validation.values()})
    assert "best weights at step 1, and the output folder has none" in run.lines[0]


def test_losses_of_other_records_are_not_compared():
    """A loss of 2 on harder records may be better than the 1 on easy ones, and nothing would ever be saved again."""
    values = json.loads(json.dumps(Run([1.0]).to(1).validation.values()))
    run = Run([1.0, 2.0], records="b")
    run.steps = 1
    run.validation.restore(values)
    run.to(2)
    assert run.kinds("saved") == [2] == run.first and run.validation.best_loss == 2.0
    assert "the validation records are others" in run.lines[0]
    same = Run([1.0, 2.0])
    same.validation.restore(values)
    same.steps = 1
    assert same.to(2).kinds("saved") == []


# -- the best weights -------------------------------------------------------------------------------------------------


def best_checkpoint(folder: Path, save: Any, processes: int = 1) -> tuple[BestCheckpoint, list[str]]:
    lines: list[str] = []
    accelerator = types.SimpleNamespace(num_processes=processes, is_main_process=True)
    arguments = {"model_path": "m", "codec_path": "c", "output_dir": str(folder)}
    made = BestCheckpoint(
        save, accelerator=accelerator, model="model", arguments=arguments, folder=folder, say=lines.append
    )
    return made, lines


def save_checkpoint(accelerator: Any, model: Any, model_path: str, codec_path: str, output_dir: Path, train_args: Any):
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "model").write_text(json.dumps(train_args))


def step_of(folder: Path) -> int:
    return json.loads((folder / "best" / "model").read_text())["best_step"]


@pytest.mark.parametrize("links", [True, False])
def test_best_leads_to_the_newest_and_the_former_is_gone(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(Path, "symlink_to", lambda *_, **__: (_ for _ in ()).throw(OSError("no links here")))
    mine = tmp_path / "best-step-of-mine"
    mine.mkdir()
    made, lines = best_checkpoint(tmp_path, save_checkpoint)
    for step in (2, 5):
        assert not made.stands() or step_of(tmp_path) == 2
        assert made.write(step, 1, 3.0)
        assert step_of(tmp_path) == step
    names = {path.name for path in tmp_path.iterdir()}
    assert names == ({"best", "best-step-5", mine.name} if links else {"best", mine.name})
    assert (tmp_path / "best").is_symlink() == links and lines == []


@pytest.mark.parametrize("links", [True, False])
def test_the_best_of_an_earlier_training_stays(tmp_path, monkeypatch, links):
    """Nothing was compared with it: the first evaluation of a training that starts anew would delete it."""
    if not links:
        monkeypatch.setattr(Path, "symlink_to", lambda *_, **__: (_ for _ in ()).throw(OSError("no links here")))
    for training, steps in enumerate(((300, 600), (100, 600), (600,))):
        made, lines = best_checkpoint(tmp_path, save_checkpoint)
        for number, step in enumerate(steps):
            assert made.write(step, 1, float(training), is_first=number == 0)
    own = "best-step-600" if links else "best"
    found = {
        path.name: json.loads((path / "model").read_text())["best_validation_loss"]
        for path in tmp_path.iterdir()
        if not path.is_symlink()
    }
    assert found == {f"{own}-earlier": 0.0, f"{own}-earlier-2": 1.0, own: 2.0} and step_of(tmp_path) == 600
    assert lines == [f"{own} is an earlier training's: it stays as {own}-earlier-2; delete it when it is not needed"]


class Killed(BaseException):
    """Stands for the end of the process."""


def kill_at(number: int, patch: pytest.MonkeyPatch) -> None:
    """Raises :class:`Killed` at that call, counted from 1, of those that change the disk."""
    calls = []

    def counted(original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(original)
            if len(calls) == number:
                raise Killed
            return original(*args, **options)

        return call

    for holder, name in ((os, "replace"), (Path, "symlink_to"), (Path, "unlink"), (best.shutil, "rmtree")):
        patch.setattr(holder, name, counted(getattr(holder, name)))


def test_whenever_it_is_interrupted_best_leads_to_whole_weights(tmp_path, monkeypatch):
    """Ends the process, so to speak, at each call that changes the disk."""

    reached = []
    for number in range(1, 20):
        folder = tmp_path / str(number)
        best_checkpoint(folder, save_checkpoint)[0].write(1, 1, 3.0)
        made, _ = best_checkpoint(folder, save_checkpoint)
        with monkeypatch.context() as patch:
            kill_at(number, patch)
            try:
                made.write(2, 1, 2.0)
                break
            except Killed:
                reached.append(step_of(folder))
        assert made.write(2, 1, 2.0) and step_of(folder) == 2
    assert reached[0] == 1 and reached[-1] == 2 and len(reached) >= 6


def test_a_full_disk_ends_no_training_of_one_process(tmp_path):
    def full(**_: Any) -> None:
        raise OSError(28, "No space left on device")

    def save(accelerator: Any, model: Any, output_dir: Path) -> None:
        full()

    made, lines = best_checkpoint(tmp_path, save)
    assert not made.write(2, 1, 3.0) and "best weights could not be saved at step 2" in lines[0]
    with pytest.raises(OSError, match="No space left"):
        best_checkpoint(tmp_path, save, processes=2)[0].write(2, 1, 3.0)


def test_a_folder_that_is_called_best_is_replaced_as_a_whole(tmp_path):
    (tmp_path / "best").mkdir()
    made, _ = best_checkpoint(tmp_path, save_checkpoint)
    assert made.write(3, 1, 1.0) and step_of(tmp_path) == 3 and not (tmp_path / "best").is_symlink()


def test_a_save_checkpoint_that_wants_more_is_refused():
    check_signature(save_checkpoint)
    with pytest.raises(SeamError, match="it wants optimizer, which the layer does not know"):
        check_signature(lambda accelerator, model, output_dir, optimizer: None)


def test_best_weights_are_counted_by_the_disk_check(monkeypatch):
    def copies(**environment: str) -> int:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(f"MOSS_LOWMEM_{name}", value)
            return whole_checkpoints(load_settings(), LocalFamily(), types.SimpleNamespace(num_epochs=3))

    assert copies() == copies(VALID_SHARE="0.1", VALID_BEST="0") == 3
    assert copies(VALID_SHARE="0.1") == 5


# -- records ----------------------------------------------------------------------------------------------------------


def training(tmp_path: Path, count: int, processes: int = 1, **fields: Any) -> Any:
    records = [speech(id=str(index), audio_codes=[[1, 2, 3]] * (index + 1), **fields) for index in range(count)]
    path = write(tmp_path / "train.jsonl", *records)
    return load_checked(upstream_loader, str(path), processes, 0, **checking(tmp_path, []))


def checking(tmp_path: Path, said: list[str], **options: Any) -> dict[str, Any]:
    return {
        "rules": SPEECH,
        "counter": UpperBounds(SPEECH),
        "options": DataOptions(**options),
        "output_folder": tmp_path / "output",
        "say": said.append,
    }


def test_a_share_is_seeded_and_draws_from_no_global_generator(tmp_path):
    data = training(tmp_path, 50)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    kept, held = take_share(data, 0.1, seed=42)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    names = [record["id"] for record in held.records]
    assert names == [record["id"] for record in take_share(data, 0.1, seed=42)[1].records] and len(names) == 5
    assert names != [record["id"] for record in take_share(data, 0.1, seed=43)[1].records]
    left = [record["id"] for record in kept.loaded[1]]
    assert left == [str(index) for index in range(50) if str(index) not in names]
    # One number a record that is left, in its order: they go by the number of frames.
    frames = [len(record["audio_codes"]) for record in kept.loaded[1]]
    assert [a - b for a, b in zip(kept.report.positions[1:], kept.report.positions)] == [
        a - b for a, b in zip(frames[1:], frames)
    ]
    assert 0 < kept.report.supervised_share <= 1 and held.of_all


def test_a_share_leaves_one_record_at_least(tmp_path):
    kept, held = take_share(training(tmp_path, 2), 0.99, seed=1)
    assert len(kept.loaded[1]) == len(held.records) == 1
    with pytest.raises(DataError, match=r"VALID_SHARE=0.5 of 1 record\. Expected 2 or more"):
        take_share(training(tmp_path, 1), 0.5, seed=1)


def test_validation_files_are_checked_like_training_files(tmp_path):
    data, said = training(tmp_path, 3), []
    path = write(tmp_path / "valid.jsonl", speech(), speech(audio_codes=[[1, 2]]))
    with pytest.raises(DataError, match=rf"{path}:2 id=a codebooks: audio_codes has 2 codes a frame"):
        load_files(upstream_loader, str(path), 0, data, **checking(tmp_path, said))
    found = load_files(upstream_loader, str(path), 0, data, **checking(tmp_path, said, bad_records="skip"))
    assert len(found.records) == 1 and found.of_all
    assert said[-1].startswith("validation data skipped_records=")
    assert (tmp_path / "output" / "validation" / "skipped_records.jsonl").exists()
    assert not (tmp_path / "output" / "skipped_records.jsonl").exists()  # of the training records


def test_a_reference_that_only_validation_would_have_to_encode_is_refused(tmp_path):
    path = write(tmp_path / "valid.jsonl", speech(ref_audio="voice.wav"))
    with pytest.raises(DataError, match="has 1 reference audio files without codes"):
        load_files(upstream_loader, str(path), 0, training(tmp_path, 2), **checking(tmp_path, []))
    with_codec = training(tmp_path, 2, ref_audio="voice.wav")
    assert load_files(upstream_loader, str(path), 0, with_codec, **checking(tmp_path, [])).records


def test_settings():
    assert not Settings().validates
    assert Settings(valid_share=0.02).saves_best and not Settings(valid_jsonl="x", valid_best="0").saves_best
    for environment, expected in (
        ({"VALID_JSONL": "x", "VALID_SHARE": "0.1"}, "both set"),
        ({"VALID_STEPS": "5"}, "no records to evaluate. Set MOSS_LOWMEM_VALID_JSONL"),
        ({"VALID_SHARE": "1"}, "less than 1"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(f"MOSS_LOWMEM_{name}", value)
            with pytest.raises(SettingsError, match=expected):
                load_settings()


def test_modules_of_an_engine_are_put_back_one_by_one():
    layer = nn.Sequential(nn.Dropout(), nn.Dropout())
    layer[0].eval()
    other = copy.deepcopy(layer)
    with evaluation_mode(layer):
        assert not any(module.training for module in layer.modules())
    assert [m.training for m in layer.modules()] == [m.training for m in other.modules()] == [True, False, True]
