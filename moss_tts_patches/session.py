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
from .data.install import CheckedData, DataOptions
from .engines import TrainingEngine, engine_of
from .engines.learning_rate import step_rate_once
from .engines.sharded_windows import close_windows
from .errors import EnvironmentProblem, SeamError, ending_the_run
from .families.family import Family, TrainingContext, supervised_positions
from .families.self_check import check_against_upstream
from .ledger import Ledger
from .loss.engine import LossEngine
from .loss.problem import IGNORE_INDEX
from .memory.card import StorePlacement
from .optim import build_optimizer
from .runtime.checkpointing import checkpoint_layers, layer_parameters
from .runtime.decisions import Decisions
from .runtime.nonfinite import NonFiniteGradients
from .runtime.parked import park_embedding
from .runtime.precision import settle_precision
from .runtime.recording import RunRecord
from .runtime.report import GIB, StepClock, describe_module, describe_parameters, log, peak_memory
from .runtime.resume.run import ResumableRun
from .runtime.resume.writer import ResumeOptions
from .runtime.saving import finish_interrupted_saves, name_in_the_end
from .runtime.stores import StoreRequest, build_stores
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
        store: receives gradients once the model is loaded.
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
        self._output_folder = Path(".")
        self._upstream_forward: Any = None
        self._arguments_parsed: Any = None
        self._said: set[str] = set()
        self.record = RunRecord(settings.progress, log)
        self._parked_bytes = 0
        self._checkpointed_layers = 0
        self.decisions = Decisions(settings, family, log)
        self.loop: TrainingLoop

    # -- upstream's order of events ------------------------------------------------------------------------------

    def parsed(self, namespace: Any) -> Any:
        """The trainer's arguments are known, nothing has been done yet; returns them unchanged."""
        self.seed = int(getattr(namespace, "seed", 0))
        self._output_folder = Path(getattr(namespace, "output_dir", "."))
        self.decisions.arguments_known(namespace)
        self._arguments_parsed = namespace
        settle_precision(namespace, full=self.adapters is None, log=log)
        model_path = str(getattr(namespace, "model_path", ""))
        if self.adapters is not None:
            self.adapters.started(model_path, getattr(namespace, "learning_rate", None))
        with ending_the_run():
            self.resume.started(self._output_folder, vars(namespace), is_main=self.watch.is_main)
        self.watch.started(self._output_folder)
        if self.settings.preflight == "1":
            self.watch.check(self._output_folder, model_path, self._whole_checkpoints(), resumes=self.resume.goes_on)
        return namespace

    def _whole_checkpoints(self) -> int:
        """How many times the model's size the run writes to its output folder; adapters are small."""
        saves = getattr(self._arguments_parsed, "num_epochs", 1) + self.family.extra_checkpoints
        if self.adapters is not None:
            return {"none": 0, "last": 1, "all": saves}[self.settings.merge]
        # A point holds bf16 weights and 8-bit states: twice the weights. One more than are kept while it is written.
        points = 2 * (self.settings.keep + 1) if self.resume.options.saves else 0
        return saves + points + 2 * self.settings.saves_best  # a new best stands beside the former until it is whole

    @ending_the_run()
    def accelerator_created(self, accelerator: Any) -> None:
        """Checks the engine; the first thing that main() does after its arguments."""
        self.parallel = engine_of(accelerator)
        self.parallel.check(self._arguments_parsed, self.settings.method)
        self.parallel.settle_loading(self.family.loads_in_parts)
        corrected = self.corrects("gradient_clipping")
        if (change := self.parallel.settle_clipping(self._arguments_parsed, corrected=corrected)) is not None:
            log(f"correction=gradient_clipping {change}")
        self.accelerator = accelerator
        self.resume.accelerator_created(accelerator.device, accelerator.process_index, accelerator.num_processes)
        if self.parallel.owns_optimizer and (self.resume.options.saves or self.resume.goes_on):
            raise EnvironmentProblem(
                f"engine {self.parallel.title}: it owns the optimizer states, which resume points of the layer do not "
                "hold. Unset MOSS_LOWMEM_SAVE_STEPS and MOSS_LOWMEM_SAVE_MINUTES, and set MOSS_LOWMEM_RESUME=off."
            )
        self.decisions.engine_known(self.parallel)
        if accelerator.is_main_process:
            finish_interrupted_saves(self._output_folder, log)

    @ending_the_run()
    def load_records(self, upstream: Any, spec: str, world_size: int, rank: int) -> Any:
        """Reads and checks the records, in the place of the trainer's own reading."""
        loaded = self.data.load(
            upstream,
            vars(self.trainer),
            self._arguments_parsed,
            spec=spec,
            processes=world_size,
            rank=rank,
            output_folder=self._output_folder,
            find_limit=self._limit_finder(),
        )
        self.resume.note("max_positions", self.data.most_positions)
        self.resume.records_known(loaded[1])
        return loaded

    def _limit_finder(self) -> Callable[[CheckedData], int | None] | None:
        """How MOSS_LOWMEM_MAX_POSITIONS=auto finds its number; a run that goes on keeps the one it began with."""
        if self.settings.max_positions != "auto":
            return None
        if not self.resume.goes_on:
            return self._longest_record
        noted = self.resume.noted("max_positions")
        return lambda checked: noted if noted is not None and max(checked.report.positions) > noted else None

    def _longest_record(self, checked: CheckedData) -> int | None:
        """How many positions a record may have for the card; None where every one fits."""
        model_class, config = self.family.class_and_config(
            vars(self.trainer), self._arguments_parsed, self.accelerator.device
        )
        self.family.check_class(model_class)
        adapters = self.adapters.plan if self.adapters is not None else None
        return self.decisions.longest_record(model_class, config, self.accelerator, checked, adapters)

    @ending_the_run()
    def loader_made(self, loader: Any) -> Any:
        """The trainer has made its ``DataLoader``; returns the one that it gets."""
        arguments, processes = self._arguments_parsed, self.accelerator.num_processes
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
        self.family.check_class(model_class)
        with self.parallel.building(), torch.device("meta"), torch.random.fork_rng(devices=[]):
            structure = model_class(config)
        self.family.check_structure(structure)
        self.decisions.plan(
            model_class,
            config,
            self.accelerator,
            self.data.checked,
            self.adapters.plan if self.adapters is not None else None,
            repository=Path(vars(self.trainer)["__file__"]).resolve().parents[2],
        )
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
                self._parked_bytes += park_embedding(parent, attribute)
            else:
                getattr(parent, attribute).requires_grad_(False)
        if self.adapters is not None:
            self.adapters.model_loaded(model, self.seed)
            self.ledger.apply(model, "save_pretrained", self._save_adapter, "an adapter instead of the whole model")
        if self.decisions.checkpoints_layers:
            self.enable_checkpointing()
        self._choose_stores()
        self.loop = self._make_loop()

    def _choose_stores(self) -> None:
        """Decides where gradients and states live, now that the model's size is known."""
        settings, device = self.settings, self.accelerator.device
        chosen = self.decisions.placements
        request = StoreRequest(
            StorePlacement(chosen.gradients, chosen.states, chosen.weights),
            host_gradient_dtype=getattr(torch, chosen.host_gradient_dtype),
            optimizer=settings.optimizer,
            schedule=self.decisions.schedule,
            checkpointed_layers=self._checkpointed_layers,
            loss_scaler=self.accelerator.scaler is not None,
            engine_reason=self.parallel.device_gradients_reason,
            four_bit=settings.method == "qlora",
        )
        card = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        self.stores = build_stores(
            request, self.model, lambda: layer_parameters(self.family.backbone(self.model)), card
        )
        self.placement, self.store = self.stores.placement, self.stores.gradients

    def _make_loop(self) -> TrainingLoop:
        loss_engine = LossEngine(
            self.decisions.engine_options, self.store, self.stores.weights_away, self.record.observe
        )
        context = TrainingContext(
            engine=loss_engine,
            direct=self.decisions.schedule != "autograd",
            loss_scale=self._loss_scale,
            finite_empty_channels=self.corrects("empty_channel_loss"),
            say_once=self.say_once,
            summarise_labels=lambda labels: supervised_positions(labels, IGNORE_INDEX),
            every_weight=self.parallel.several,
            inside_forward=self.parallel.loss_inside_forward,
        )
        return TrainingLoop(
            family=self.family,
            accelerator=self.accelerator,
            parallel=self.parallel,
            context=context,
            stores=self.stores,
            data=self.data,
            resume=self.resume,
            clock=self.clock,
            record=self.record,
            watch=self.watch,
            adapters=self.adapters,
            before_first=self.ledger.verify,
            tries_longest=self.settings.longest_first == "1",
            nonfinite=NonFiniteGradients(self.settings.nonfinite, self.data.name_record),
            trainer_decides=self.family.decides_on_nonfinite(self._arguments_parsed),
            say=log,
        )

    def enable_checkpointing(self) -> None:
        """What upstream's ``--gradient-checkpointing`` means here."""
        self._checkpointed_layers = checkpoint_layers(self.family.backbone(self.model), self.parallel.recompute)

    def make_optimizer(self, parameters: Iterable[nn.Parameter], options: dict[str, Any]) -> Any:
        """Builds the optimizer that the trainer's ``AdamW(...)`` call asks for."""
        given = list(parameters)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        unknown = sum(1 for parameter in given if parameter not in names)
        if unknown:
            raise SeamError(
                f"seam sft.py.AdamW: {unknown} of {len(given)} parameters do not belong to the loaded model. The layer "
                "needs their names to save and restore optimizer state; upgrade moss_tts_patches, or use MOSS_LOWMEM=0."
            )
        if self.parallel.owns_optimizer:
            if self.settings.optimizer != "adamw":
                log(f"optimizer=adamw instead_of={self.settings.optimizer} reason='{self.parallel.optimizer_reason}'")
            self.loop.optimizer = self.optimizer = torch.optim.AdamW([p for p in given if p.requires_grad], **options)
            return self.optimizer
        named = [(names[parameter], parameter) for parameter in given]
        self.optimizer = build_optimizer(
            self.settings.optimizer, named, self.store, self.placement.states, seed=self.seed, **options
        )
        self.loop.drive(self.optimizer)
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
            self.record.started(self._output_folder, self.accelerator.device, self._about())
        own_loader = next((item for item in prepared if hasattr(item, "base_dataloader")), None)
        micro_batches = self.data.micro_batches if own_loader is None else len(own_loader)
        self.loop.total_steps = steps_of_training(self._arguments_parsed, micro_batches)
        processes = self.accelerator.num_processes
        if self.corrects("learning_rate_steps") and step_rate_once(prepared, processes):
            log(
                "correction=learning_rate_steps the learning rate takes one step per optimizer step (upstream: "
                f"{processes}, so that its schedule ends after 1/{processes} of the training)"
            )
        self._report_start()
        atexit.register(self._report_end)
        self.resume.prepared(prepared, self.model, self.optimizer, self.accelerator.scaler)
        if self.stores.parking is not None:
            self.stores.parking.weights_changed()
        begin_validation(self, next(item for item in prepared if isinstance(item, nn.Module)))

    @property
    def trainer_arguments(self) -> dict[str, Any]:
        """The trainer's command line, parsed, by name."""
        return vars(self._arguments_parsed)

    @property
    def output_folder(self) -> Path:
        """The trainer's output folder."""
        return self._output_folder

    def _optimizer_prepared(self, wrapper: Any) -> None:
        """Gives the layer's optimizer its gradients and states; the model stands on its device."""
        # Only now: on a GPU the weights have just left the host memory that is asked for here.
        self.store.attach((name, parameter) for parameter, name in self.optimizer.names.items())
        with self.watch.guard.phase("optimizer state creation"):
            self.optimizer.reserve_states()
        parkable = list(layer_parameters(self.family.backbone(self.model))) if self.stores.can_park else []
        self.watch.model_ready(self.model, self.accelerator.device, self.stores, self.optimizer, parkable)
        self.loop.watch_step(wrapper)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """What is saved of the model where that is not all of it."""
        if self.adapters is None or self.adapters.adapters is None:
            return None
        trained = [p for p in self.model.parameters() if p.requires_grad]
        with self.parallel.gathered(trained):
            return {n: t.detach().to("cpu", copy=True) for n, t in self.adapters.adapters.state_dict().items()}

    def _save_adapter(
        self, save_directory: Any, *_: Any, state_dict: Any = None, is_main_process: bool = True, **__: Any
    ) -> None:
        """Takes the place of ``model.save_pretrained`` in the trainer's ``save_checkpoint``.

        Upstream passes on what :meth:`state_dict` gave it, so nothing is gathered twice.
        """
        tensors = self.state_dict() if state_dict is None else state_dict
        if self.adapters is not None and tensors is not None and is_main_process:
            folder = Path(save_directory)
            self.adapters.save(folder, name_in_the_end(folder), self.clock.steps, tensors)

    def checkpoint_saved(self, checkpoint: Path) -> None:
        """The trainer's ``save_checkpoint`` is done; ``checkpoint`` is whole."""
        if self.adapters is not None:
            last = self.family.is_last_checkpoint(checkpoint.name, self._arguments_parsed, self.clock.steps)
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

    def _loss_scale(self) -> float:
        scaler = self.accelerator.scaler
        scale = scaler.get_scale() if scaler is not None else 1.0
        return scale / self.accelerator.gradient_accumulation_steps

    def say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            log(line)

    def _report_start(self) -> None:
        settings, model = self.settings, self.model
        import accelerate
        import transformers

        log(
            f"moss_tts_patches={__version__} torch={torch.__version__} transformers={transformers.__version__} "
            f"accelerate={accelerate.__version__} family={self.family.name}"
        )
        log("patched=" + ",".join(patch.place for patch in self.ledger))
        backbone, depth = self.family.backbone(model), self.family.depth_model(model)
        log(f"{describe_module('backbone', backbone)} {describe_module('depth', depth)}")
        log(
            f"plan schedule={self.decisions.schedule} chunk_frames={settings.chunk_frames} "
            f"checkpointed_layers={self._checkpointed_layers} optimizer={settings.optimizer} "
            f"gradients={self.placement.gradients} states={self.placement.states} "
            f"weights={self.placement.weights} "
            f"corrections={','.join(settings.corrections) or 'none'}"
        )
        log(f"{describe_parameters(model)} kept_off_gpu={self._parked_bytes / GIB:.2f}GiB")

    def _about(self) -> dict[str, Any]:
        """What the log says of the run before its first step."""
        choice = self.decisions.choice
        return {
            "family": self.family.name,
            "moss_tts_patches": __version__,
            "method": self.settings.method,
            "schedule": self.decisions.schedule,
            "plan": None if choice is None else choice.rung.name,
            "plan_bytes": {} if choice is None else choice.planned_bytes(),
        }

    def _report_end(self) -> None:
        self.record.ended()
        if self.clock.has_timed:
            log(
                f"steps={self.clock.steps} median_step_time={self.clock.median_seconds():.2f}s "
                f"{peak_memory(self.accelerator.device)}"
            )
