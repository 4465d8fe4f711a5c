"""One run: trainer -> family -> patches -> model -> optimizer, in the order in which upstream's main() gets there."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import __version__
from .data.held_out import HeldOut
from .data.install import DataOptions
from .engines import TrainingEngine, engine_of
from .engines.learning_rate import step_rate_once
from .engines.sharded_windows import close_windows
from .errors import SeamError, ending_the_run
from .families.family import Family
from .families.self_check import check_against_upstream
from .ledger import Ledger
from .runtime.adapter_checkpoints import AdapterCheckpoints
from .runtime.assembly import make_loop, make_optimizer, make_stores
from .runtime.checkpointing import checkpoint_layers, layer_parameters
from .runtime.decisions import Decisions
from .runtime.disk_need import whole_checkpoints
from .runtime.named_model import check_named_model
from .runtime.output_lock import claim
from .runtime.parked import park_embedding
from .runtime.position_limit import limit_finder
from .runtime.precision import settle_precision
from .runtime.recording import RunRecord
from .runtime.report import StepClock, log
from .runtime.resume.run import ResumableRun
from .runtime.resume.writer import ResumeOptions
from .runtime.run_report import describe_run, end_line, nothing_left_line, start_lines
from .runtime.saving import finish_interrupted_saves, written_once
from .runtime.stores import Stores
from .runtime.training_data import TrainingData, steps_of_training
from .runtime.training_loop import TrainingLoop
from .runtime.validation.beginning import begin_validation
from .runtime.validation.course import Validation
from .runtime.watch import MachineWatch, Surroundings
from .settings import Settings

if TYPE_CHECKING:
    from .adapters.training import AdapterTraining


class Session:
    """State of the run; the patches are thin functions that call its methods.

    Attributes:
        arguments: the trainer's command line, normalised; upstream's parser gets it.
        arguments_parsed: what that parser made of it.
        output_folder: the trainer's.
        stores: where gradients, states and idle weights live; there once the model is loaded, as :attr:`loop` is.
        checkpointed_layers: of the backbone, recomputed in the backward.
        parked_bytes: of embeddings that training never reads, kept off the GPU.
        save_plainly: the trainer's ``save_checkpoint``, whole or not at all, for weights that are none of its own
            checkpoints.
    """

    def __init__(
        self,
        settings: Settings,
        family: Family,
        trainer: ModuleType,
        arguments: list[str],
        adapters: AdapterTraining | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.settings, self.family, self.trainer = settings, family, trainer
        self.ledger = Ledger()
        self.arguments = arguments
        self.seed = 0
        self.clock = StepClock()
        self.accelerator: Any = None
        self.parallel: TrainingEngine
        self.model: Any = None
        self.optimizer: Any = None
        self.adapters = adapters
        self.data = TrainingData(
            DataOptions(settings.bad_records, settings.most_positions, settings.corrects("prompt_length")),
            family.record_rules,
            log,
            HeldOut(settings.valid_jsonl, settings.valid_share),
        )
        self.validation = Validation(settings.valid_steps, log)
        self.save_plainly: Callable[..., Any] | None = None
        self.watch = MachineWatch(surroundings or Surroundings(), log)
        self.resume = ResumableRun(
            ResumeOptions(settings.save_steps, settings.save_minutes, settings.keep, settings.resume),
            family.name,
            settings=settings.model_dump(mode="json"),
            versions={"moss_tts_patches": __version__, "torch": torch.__version__},
            say=log,
            arrived=self._resumed,
        )
        self.resume.validation = self.validation
        self.output_folder = Path(".")
        self._adapter_checkpoints: AdapterCheckpoints | None = None
        self._upstream_forward: Any = None
        self.arguments_parsed: Any = None
        self._said: set[str] = set()
        self.record = RunRecord(settings.progress, log)
        self.parked_bytes = 0
        self.checkpointed_layers = 0
        self.decisions = Decisions(settings, family, log, adapters.plan if adapters is not None else None)
        self.stores: Stores
        self.loop: TrainingLoop

    # -- upstream's order of events ------------------------------------------------------------------------------

    def parsed(self, namespace: Any) -> Any:
        """The trainer's arguments are known, nothing has been done yet; returns them unchanged."""
        self.seed = int(getattr(namespace, "seed", 0))
        self.output_folder = Path(getattr(namespace, "output_dir", "."))
        self.decisions.arguments_known(namespace)
        self.arguments_parsed = namespace
        settle_precision(namespace, full=self.adapters is None, log=log)
        model_path = str(getattr(namespace, "model_path", ""))
        check_named_model(model_path, self.family.name)
        if self.adapters is not None:
            self.adapters.started(model_path, getattr(namespace, "learning_rate", None))
        if self.watch.is_main:  # before a resume point is looked for: a training that is just ending may write one
            claim(self.output_folder)
        with ending_the_run():
            self.resume.started(self.output_folder, vars(namespace), is_main=self.watch.is_main)
        self.watch.started(self.output_folder)
        if self.settings.preflight == "1":
            copies = whole_checkpoints(self.settings, self.family, namespace)
            self.watch.check(self.output_folder, model_path, copies, resumes=self.resume.goes_on)
        return namespace

    @ending_the_run()
    def accelerator_created(self, accelerator: Any) -> None:
        """Checks the engine; the first thing that main() does after its arguments."""
        self.parallel = engine_of(accelerator)
        self.parallel.check(self.arguments_parsed, self.settings.method)
        self.parallel.settle_loading(self.family.loads_in_parts)
        corrected = self.corrects("gradient_clipping")
        if (change := self.parallel.settle_clipping(self.arguments_parsed, corrected=corrected)) is not None:
            log(f"correction=gradient_clipping {change}")
        self.accelerator = accelerator
        self.watch.device_known(accelerator.device)
        self.resume.accelerator_created(accelerator.device, accelerator.process_index, accelerator.num_processes)
        self.parallel.check_resume_points(self.resume.options.saves or self.resume.goes_on)
        self.decisions.engine_known(self.parallel)
        if accelerator.is_main_process:
            finish_interrupted_saves(self.output_folder, log)

    @ending_the_run()
    def load_records(self, upstream: Any, spec: str, world_size: int, rank: int) -> Any:
        """Reads and checks the records, in the place of the trainer's own reading."""
        loaded = self.data.load(
            upstream,
            vars(self.trainer),
            self.arguments_parsed,
            spec=spec,
            processes=world_size,
            rank=rank,
            output_folder=self.output_folder,
            find_limit=limit_finder(self),
        )
        self.resume.note("max_positions", self.data.most_positions)
        self.resume.records_known(loaded[1])
        return loaded

    @ending_the_run()
    def loader_made(self, loader: Any) -> Any:
        """The trainer has made its ``DataLoader``; returns the one that it gets."""
        arguments, processes = self.arguments_parsed, self.accelerator.num_processes
        self.data.loader_made(loader, processes)
        if not (self.data.is_sharded and self.family.leaves_windows_open and self.corrects("sharded_windows")):
            return loader
        own = len(loader)
        closed = close_windows(
            loader, self.accelerator, arguments.gradient_accumulation_steps, arguments.max_train_steps
        )
        self.data.micro_batches = len(closed)
        log(f"correction=sharded_windows micro_batches_per_epoch={len(closed)} of_own={own} every epoch ends in a step")
        return closed

    @ending_the_run()
    def before_model_load(self, model_class: Any, config: Any) -> None:
        """Checks upstream's structure and mathematics while nothing expensive has happened."""
        # Again: the first time the trainer had not downloaded a model of a hub yet.
        check_named_model(str(getattr(self.arguments_parsed, "model_path", "")), self.family.name)
        self.family.check_class(model_class)
        with self.parallel.building(), torch.device("meta"), torch.random.fork_rng(devices=[]):
            structure = model_class(config)
        self.family.check_structure(structure)
        repository = Path(vars(self.trainer)["__file__"]).resolve().parents[2]
        self.decisions.plan(model_class, config, self.accelerator, self.data.checked, repository)
        if self.adapters is not None:
            self.adapters.structure_known(structure, self.accelerator.mixed_precision, self.accelerator.device)
        if self.settings.checks_itself:
            with self.parallel.building():
                options = self.decisions.engine_options
                check_against_upstream(self.family, model_class, config, self._upstream_forward, options)

    def loading_options(self) -> dict[str, Any]:
        """What ``from_pretrained`` is given besides the trainer's own arguments."""
        return self.adapters.loading_options() if self.adapters is not None else {}

    def loading(self) -> AbstractContextManager[object]:
        """Open while ``from_pretrained`` runs."""
        return self.parallel.loading()

    @ending_the_run()
    def model_loaded(self, model: Any) -> None:
        """Shapes the model for training; it still stands in host memory."""
        self.model = model
        for parent, attribute in self.family.unread_embeddings(model):
            if self.parallel.parks_embeddings:
                self.parked_bytes += park_embedding(parent, attribute)
            else:
                getattr(parent, attribute).requires_grad_(False)
        if self.adapters is not None:
            self.resume.note("adapter", self.adapters.model_loaded(model, self.seed).scale())
            self._adapter_checkpoints = AdapterCheckpoints(self.adapters, model, self.parallel, self.clock)
            save = self._adapter_checkpoints.save_pretrained
            self.ledger.apply(model, "save_pretrained", save, "an adapter instead of the whole model")
        else:
            save = written_once(model.save_pretrained)
            self.ledger.apply(model, "save_pretrained", save, "weights are written by the main process alone")
        if self.decisions.checkpoints_layers:
            self.enable_checkpointing()
        self.stores = make_stores(self)
        self.loop = make_loop(self)

    def enable_checkpointing(self) -> None:
        """What upstream's ``--gradient-checkpointing`` means here."""
        self.checkpointed_layers = checkpoint_layers(self.family.backbone(self.model), self.parallel.recompute)

    def make_optimizer(self, parameters: Iterable[nn.Parameter], options: dict[str, Any]) -> Any:
        """Builds the optimizer that the trainer's ``AdamW(...)`` call asks for."""
        self.optimizer = make_optimizer(self, parameters, options)
        return self.optimizer

    def before_prepare(self, objects: tuple[Any, ...]) -> None:
        """Checks that what is prepared is what the layer built."""
        if self.model is None or self.optimizer is None or not any(item is self.optimizer for item in objects):
            raise SeamError(
                "seam sft.py.main: accelerator.prepare was called without the layer's optimizer. Expected the trainer "
                "to load its model, build AdamW from it and prepare both; upgrade moss_tts_patches, or use "
                "MOSS_LOWMEM=0."
            )
        self.parallel.before_prepare(self.family.backbone(self.model))

    def after_prepare(self, prepared: tuple[Any, ...]) -> None:
        """Checks the optimizer that accelerate hands back, and says what will run."""
        wrapper = self.parallel.prepared_optimizer(self.optimizer, prepared)
        if not self.parallel.owns_optimizer:
            self._optimizer_prepared(wrapper)
        if self.accelerator.is_main_process:
            claim(self.output_folder, makes=True)
            self.record.started(self.output_folder, self.accelerator.device, describe_run(self))
        own_loader = next((item for item in prepared if hasattr(item, "base_dataloader")), None)
        micro_batches = self.data.micro_batches if own_loader is None else len(own_loader)
        self.loop.total_steps = steps_of_training(self.arguments_parsed, micro_batches)
        if self.corrects("learning_rate_steps"):
            change = step_rate_once(prepared, self.accelerator.num_processes)
            if change is not None:
                log(f"correction=learning_rate_steps {change}")
        for line in start_lines(self):
            log(line)
        atexit.register(self._report_end)
        self.resume.prepared(prepared, self.model, self.optimizer, self.accelerator.scaler)
        if self.stores.parking is not None:
            self.stores.parking.weights_changed()
        begin_validation(self, next(item for item in prepared if isinstance(item, nn.Module)))

    def _optimizer_prepared(self, wrapper: Any) -> None:
        """Gives the layer's optimizer its gradients and states; the model stands on its device."""
        # Only now: on a GPU the weights have just left the host memory that is asked for here.
        self.stores.gradients.attach((name, parameter) for parameter, name in self.optimizer.names.items())
        with self.watch.guard.phase("optimizer state creation"):
            self.parallel.check_host_room(self.stores.sizes.states if self.stores.placement.states == "host" else 0)
            self.optimizer.reserve_states()
        parkable = list(layer_parameters(self.family.backbone(self.model))) if self.stores.can_park else []
        self.watch.model_ready(self.model, self.accelerator.device, self.stores, self.optimizer, parkable)
        self.loop.watch_step(wrapper)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """What is saved of the model where that is not all of it."""
        return None if self._adapter_checkpoints is None else self._adapter_checkpoints.state_dict()

    def checkpoint_saved(self, checkpoint: Path) -> None:
        """The trainer's ``save_checkpoint`` is done; ``checkpoint`` is whole."""
        if self.adapters is not None:
            last = self.family.is_last_checkpoint(checkpoint.name, self.arguments_parsed, self.clock.steps)
            with ending_the_run():
                self.adapters.saved(checkpoint, last)

    def guarded(self, phase: Any, function: Any) -> Any:
        """Returns ``function`` as a phase whose memory is reported when it runs out."""
        return self.watch.guard.within(lambda: phase, function)

    # -- what the patches need -----------------------------------------------------------------------------------

    def forward(self, model: Any, batch: dict[str, Any]) -> Any:
        """One training forward of upstream's loop."""
        return self.loop.forward(model, batch)

    @property
    def nonfinite_gradients(self) -> list[str]:
        """Names of the parameters whose gradients were not finite when they were clipped last."""
        return self.loop.nonfinite_gradients

    @property
    def checks_gradients(self) -> bool:
        """Whether the layer decides what becomes of gradients that are not finite, and not the trainer."""
        return not self.loop.trainer_decides and not self.parallel.owns_optimizer

    def corrects(self, name: str) -> bool:
        """Whether the named departure from upstream's numbers is wanted."""
        return self.settings.corrects(name)

    @property
    def loss_inside_forward(self) -> bool:
        """Whether the engine needs the whole loss within the forward of the model that it wrapped."""
        return self.parallel.loss_inside_forward

    def remember_forward(self, forward: Any) -> None:
        """Keeps upstream's own forward, for the self check and for calls that are not training."""
        self._upstream_forward = forward

    def _resumed(self, steps: int) -> None:
        self.clock.go_on_from(steps)
        self.record.micro_batches = self.resume.position.micro_batches
        if steps == self.loop.total_steps:
            log(nothing_left_line(steps))

    def say_once(self, line: str) -> None:
        """Logs a line the first time it is said."""
        if line not in self._said:
            self._said.add(line)
            log(line)

    def _report_end(self) -> None:
        self.record.ended()
        if self.clock.has_timed:
            log(end_line(self.clock, self.accelerator.device))
