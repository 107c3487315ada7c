"""Base class of all tasks: the network and its optimizer, the data's names in the checkpoint, and
results from every process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer, WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from ndlightnet.data.errors import DataError, fitting
from ndlightnet.data.sampling import mixed, replica, share_samples
from ndlightnet.inference import OutOfCore
from ndlightnet.nn import Block
from ndlightnet.parallel import Processes, Shard, activated
from ndlightnet.training.core.captured_call import CapturedCall
from ndlightnet.training.core.checkpoints import describe, load_initial, some_of
from ndlightnet.training.core.costs import CostMonitor, training_costs
from ndlightnet.training.core.optim import Schedule, adamw
from ndlightnet.training.core.options import check
from ndlightnet.training.core.speed import checkpoint_blocks
from ndlightnet.training.report.figures import figure_names
from ndlightnet.training.report.results import log, log_rank_zero

T = TypeVar("T")


class Task(L.LightningModule):
    """Base class: a network `net` with AdamW. Its data are a LightningDataModule of
    ndlightnet.training. Training calls the task itself, `task(inputs)`, all else calls `task.net`.

    Args:
        net: the network.
        lr, weight_decay, betas: of AdamW.
        schedule: what the learning rate does after its warm-up, see `schedule_factor`.
        minutes: of a training, which then ends; its schedule follows the clock in place of the steps.
        warmup_epochs: epochs of the warm-up; default: 5 % of the steps.
        min_lr: the learning rate at the end, but with inverse_sqrt; default: 1 % of `lr`.
        layer_decay: the rate of each layer / that of the next one, below 1 to fine-tune; default:
            all have the same. For an NDLightNet, and networks of timm.
        compile: training runs the network through torch.compile.
        cuda_graph: training on one GPU replays what it calls, forward and backward, from a CUDA graph:
            small networks take more time in Python than on the GPU. Batches of another shape than most
            run without it. `training_step` makes one call, whose gradients are all. Not with accumulation
            and options that save memory.
        init: checkpoint of another training, such as one of `pretrain`, whose weights of the
            network a `fit` begins with, as far as they fit; a line names the others.
        grad_checkpointing: training stores only the inputs of blocks and computes the rest again in
            the backward pass: less memory, more time.
        offload: training keeps in the host's memory what the backward pass needs: the least memory,
            the most time, on its own or with grad_checkpointing.
        grid_devices: so many processes train on each sample, of which each has a slab, beside
            trainer.devices / grid_devices samples at a time: for networks and samples that do not
            fit on one device. Of NDLightNet and NDLightUNet.
        out_of_core: validation, test and prediction keep features in the host's memory: for whole
            volumes that do not fit on one device. Of NDLightNet and NDLightUNet.

    failures: one line for each file that could not be predicted. notes: one line for each decision
    that was made for the user. summary: the text printed at the end.
    """

    # entries of a checkpoint that `on_load_checkpoint` and Lightning need
    saved: tuple[str, ...] = ("names", "pytorch-lightning_version", "cost")
    # what CostMonitor times in training beside the throughput
    measures: Literal["step", "epoch"] | None = "step"
    # the metric, which validation has to log, of which the best checkpoint has the highest value; None: the last one
    monitor: ClassVar[str | None] = "val_score"
    # whether samples reach the network in ways that Lightning does not convert
    only_float32: ClassVar[bool] = False
    # whether training_step can do with slabs of the samples, see grid_devices
    grid_parallel: ClassVar[bool] = False
    # whether it calls forward or forward_features of the network before all else of it, see _shard
    shards: ClassVar[bool] = False
    grid: Shard | None
    predictor: Any  # what validation, test and prediction call
    called: nn.Module  # what training calls: the network, or a loss that calls it
    net_config: dict[str, Any] | None = None  # class and arguments of `net` on a command line

    def __init__(
        self,
        net: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        compile: bool = False,
        grad_checkpointing: bool = False,
        cuda_graph: bool = False,
        warmup_epochs: float | None = None,
        min_lr: float | None = None,
        layer_decay: float | None = None,
        init: str | None = None,
        offload: bool = False,
        grid_devices: int = 1,
        out_of_core: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        schedule: Schedule = "cosine",
        minutes: float | None = None,
    ) -> None:
        super().__init__()
        check("model.grid_devices", grid_devices, grid_devices >= 1, "1 or more processes")
        shared = grid_devices == 1 or (self.grid_parallel and hasattr(net, "slab_multiples"))
        check("model.grid_devices", grid_devices, shared, f"1 for {type(self).__name__} with {type(net).__name__}")
        check("model.lr", lr, lr > 0, "a number above 0")
        check("model.weight_decay", weight_decay, weight_decay >= 0, "0 or more")
        others = {"compile": compile, "grad_checkpointing": grad_checkpointing, "offload": offload}
        for name, on in others.items():  # a capture reads no random state, as recomputing does, and copies to no host
            check("model.cuda_graph", cuda_graph, not (cuda_graph and on), f"false with model.{name}=True")
        check("model.warmup_epochs", warmup_epochs, (warmup_epochs or 0) >= 0, "0 or more epochs")
        check("model.minutes", minutes, minutes is None or minutes > 0, "a number above 0")
        check("model.warmup_epochs", warmup_epochs, not (minutes and warmup_epochs), "null with model.minutes")
        check("model.min_lr", min_lr, 0 <= (min_lr or 0) <= lr, f"0 to model.lr={lr:g}")
        check("model.min_lr", min_lr, min_lr is None or schedule != "inverse_sqrt", f"null with {schedule}")
        check("model.betas", betas, all(0 <= beta < 1 for beta in betas), "two numbers from 0 to below 1")
        decays = layer_decay is None or 0 < layer_decay <= 1
        check("model.layer_decay", layer_decay, decays, "a fraction above 0, at most 1")
        self.net, self.compiles, self.cuda_graph, self.init = net, compile, cuda_graph, init
        self.lr, self.weight_decay, self.layer_decay = lr, weight_decay, layer_decay
        self.warmup_epochs, self.min_lr, self.betas, self.schedule = warmup_epochs, min_lr, betas, schedule
        self.grid_devices, self.offload, self.out_of_core, self.grid = grid_devices, offload, out_of_core, None
        # not registered as a submodule: a checkpoint holds one network
        vars(self)["predictor"] = OutOfCore(net) if out_of_core else net
        vars(self)["called"] = net
        self.minutes = minutes
        self.timer = None if minutes is None else Timer(timedelta(minutes=minutes), verbose=False)
        self.captured: CapturedCall | None = None  # with `cuda_graph`
        self.replayed = False  # whether the last batch was replayed
        self.ungraphed = False  # whether a batch of other shapes has been noted
        if grad_checkpointing:
            checkpoint_blocks(net)
        self.cost = CostMonitor(self.measures)
        self.failures: list[str] = []
        self.notes: list[str] = []
        self.summary = ""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call `called` as training does: compiled or from a graph, if so configured."""
        if self.captured is not None and self.training:
            shapes = [x.shape for x in inputs]
            self.replayed = shapes == self.captured.shapes and not named
            if self.replayed:
                return self.captured(*inputs)
            if not self.ungraphed:
                self.ungraphed = True
                batch, graphed = ([tuple(x) for x in each] for each in (shapes, self.captured.shapes))
                log([f"model.cuda_graph: a batch of {batch} runs without the graph, which is of {graphed}"])
        if self.compiles and "compiled" not in vars(self):
            # not registered as a submodule, or the checkpoint would hold all parameters twice
            vars(self)["compiled"] = torch.compile(self.called)
        called = vars(self)["compiled"] if self.compiles else self.called
        with ExitStack() as stack:
            if self.training and self.offload:
                stack.enter_context(save_on_cpu(pin_memory=self.device.type == "cuda"))
            if self.training and self.grid is not None:
                stack.enter_context(activated(self.grid))
                inputs = tuple(self.slab(x) for x in inputs)
            return called(*inputs, **named)

    def slab(self, x: Any) -> Tensor:
        """Return this process's slab of a tensor (batch, channels, *space) of whole samples."""
        if self.grid is None:
            raise ValueError("slab: expected a training with grid_devices above 1")
        check("model.grid_devices", f"got {type(x).__name__}", isinstance(x, Tensor), "1 for samples in packs")
        net: Any = self.net
        return self.grid.slab(x, net.slab_multiples[self.grid.axis])

    def _split_grid(self) -> None:
        """Let each `grid_devices` processes in turn get the same samples, and a slab of each."""
        share_samples(self.grid_devices if self.trainer.training else 1)
        if self.grid_devices == 1 or not self.trainer.training or self.grid is not None:
            return
        world, count = self.trainer.world_size, self.grid_devices
        expected = f"a divisor of the {world} processes (trainer.devices x trainer.num_nodes)"
        check("model.grid_devices", count, world % count == 0, expected)
        mesh = init_device_mesh(self.device.type, (world // count, count), mesh_dim_names=("data", "grid"))
        self.grid = Shard(Processes(mesh.get_group("grid")), self.grid_axis())

    def grid_axis(self) -> int:
        """Return the axis of samples that slabs are cut along."""
        return 0

    def configure_callbacks(self) -> list[L.Callback]:
        """Check the precision (this is the first hook in every command) and time the training."""
        precision = self.trainer.precision
        good = not self.only_float32 or precision == "32-true" or not precision.endswith("-true")
        check("trainer.precision", precision, good, "32-true, bf16-mixed or 16-mixed")
        return [self.cost] if self.timer is None else [self.cost, self.timer]

    def data(self) -> Any:
        module = self.trainer.datamodule  # type: ignore[attr-defined]
        expected = "a datamodule that knows its names, such as trainer.fit(task, datamodule=VolumeData(...))"
        check(type(self).__name__, "got none", module is not None, expected)
        return module

    def expect(self, **expected_values: Any) -> None:
        """Raise DataError if an attribute of the network has not the value that the data need."""
        for name, value in expected_values.items():
            if (actual := getattr(self.net, name, value)) != value:
                raise DataError(f"{self.data().root}: expected a network with {name}={value}, got {actual}")

    def out(self) -> Path:
        return Path(self.trainer.default_root_dir)

    def figure_names(self, names: Sequence[str]) -> list[str]:
        """Return the names of classes as figures show them, with a note on those without a font."""
        captions = figure_names(names)
        if numbers := [f"{a} {b}" for a, b in zip(captions, names, strict=True) if a != b]:
            lack = f"has the names of {len(numbers)} classes, which are shown as numbers: {some_of(numbers)}"
            self.notes.append(f"figures: no installed font, such as Noto Sans CJK, {lack}")
        return captions

    @contextmanager
    def one_input(self, path: object) -> Iterator[None]:
        """Turn a DataError or a lack of memory inside into a line of `failures`, so that the other
        files go on. Errors that no file can cause are raised."""
        try:
            with fitting(path):
                yield
        except DataError as error:
            self.failures.append(str(error))

    def configure_model(self) -> None:
        """Load `init`, once, before a training and before what it resumes from."""
        self._split_grid()
        if self.init is not None and self.trainer.training:
            log_rank_zero([load_initial(self.init, self.net)])
            self.init = None
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            self._shard()

    def _shard(self) -> None:
        """Split the parameters, and so gradients and the optimizer's state, among all processes (FSDP2). Each gathers a
        block while it computes, and what is not in blocks; float32 is gathered and autocast, as without."""
        trainer, net = self.trainer, self.net
        if isinstance(net, FSDPModule):  # by an earlier command of this trainer, which may have left it gathered
            net.reshard()
            return
        averages = any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks)  # type: ignore
        strategy: Any = trainer.strategy
        folders = strategy._save_distributed_checkpoint  # as checkpoints
        for argument, value, good, expected in (
            ("trainer.strategy", type(self).__name__, self.shards, "TextTask with ModelParallelStrategy"),
            ("trainer.strategy", "ModelParallelStrategy", not trainer.predicting, "auto, one device, for predict"),
            ("trainer.strategy.init_args.save_distributed_checkpoint", True, not folders, "false"),
            ("trainer.precision", trainer.precision, trainer.precision in ("32-true", "bf16-mixed"), "bf16-mixed"),
            ("model.compile", True, not self.compiles, "false with ModelParallelStrategy"),
            ("trainer.callbacks", "WeightAveraging", not averages, "none with ModelParallelStrategy"),
        ):
            check(argument, value, good, expected)
        for tensor in net.state_dict().values():  # the processes may have drawn different ones
            copy = tensor.to(strategy.root_device)
            torch.distributed.broadcast(copy, 0)
            tensor.copy_(copy)
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing changes it in place
        for block in [module for module in net.modules() if isinstance(module, Block)]:
            fully_shard(block)
        fully_shard(net)
        register_fsdp_forward_method(net, "forward_features")

    def configure_optimizers(self) -> Any:
        return adamw(self, self.net)

    def example_inputs(self) -> tuple[Tensor, ...] | None:
        """Return inputs of `called` like those of every training batch, on the task's device, for
        `cuda_graph`; None: they have many shapes."""
        return None

    def on_fit_start(self) -> None:
        """Capture `called` in a CUDA graph, if so configured."""
        self.captured, self.replayed = None, False
        if not self.cuda_graph:
            return
        inputs = self.example_inputs()
        expected = f"false: batches of {type(self).__name__} have many shapes"
        check("model.cuda_graph", "true", inputs is not None, expected)
        count = self.trainer.accumulate_grad_batches  # each replay overwrites the gradients of the one before
        check("model.cuda_graph", "true", count == 1, f"false with accumulate_grad_batches={count}")
        if self.device.type != "cuda":
            return
        strategy = type(self.trainer.strategy)
        if issubclass(strategy, ParallelStrategy):  # whose backward is where gradients are exchanged
            log_rank_zero([f"model.cuda_graph: {strategy.__name__} trains without the graph"])
            return
        self._capture(inputs)

    def _capture(self, inputs: Any) -> None:
        precision = self.trainer.precision_plugin
        inputs = precision.convert_input(inputs)
        with precision.forward_context():
            kind, autocast = torch.get_autocast_dtype(self.device.type), torch.is_autocast_enabled(self.device.type)

        def call(*inputs: Tensor) -> Any:
            # a weight cast before the capture would not be cast again in the replays
            with torch.autocast(self.device.type, kind, autocast, cache_enabled=False):
                return self.called(*inputs)

        buffers = {buffer: buffer.clone() for buffer in self.called.buffers()}
        self.captured = CapturedCall(self.called.train(), call, inputs)
        for buffer, value in buffers.items():  # such as the means of a batch norm
            buffer.copy_(value)

    def on_fit_end(self) -> None:
        self.captured, self.replayed = None, False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.replayed = False

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Leave gradients that the next backward overwrites."""
        if not self.replayed:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if self.captured is not None and self.replayed and gradient_clip_val and gradient_clip_algorithm != "value":
            self.captured.clip(gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def log(self, name: str, value: Any, prog_bar: bool = False, *args: Any, **options: Any) -> None:
        """Log a value as Lightning does; of those in the progress bar, training on a GPU logs the first step, those
        that are written, and the last: Lightning would wait for the device to show a value, and takes as long to log
        it as the optimizer to launch its update."""
        if not prog_bar or not self.trainer.training or self.device.type == "cpu" or self._logs_step():
            super().log(name, value, prog_bar, *args, **options)

    def _logs_step(self) -> bool:
        trainer, step = self.trainer, self.trainer.global_step + 1
        written = step % max(1, trainer.log_every_n_steps) == 0  # type: ignore[attr-defined]
        return step == 1 or written or trainer.is_last_batch or step == trainer.max_steps

    def on_train_epoch_start(self) -> None:
        # random numbers of the network, such as dropout, follow from the seed, the epoch and which
        # samples the process gets, so that a resumed training draws what an uninterrupted one does
        torch.manual_seed(mixed(self.data().seed, 3, self.current_epoch, replica()[0]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["names"], checkpoint["task"] = self.data().names(), type(self).__name__
        if network := describe(self.net, self.net_config):
            checkpoint["network"] = network  # for `from_checkpoint`

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        data, saved = self.data(), checkpoint["names"]
        current = data.names()
        if any(current.values()) and current != saved:
            raise DataError(f"{data.root}: has {current}, but the checkpoint was trained on {saved}")
        data.set_names(saved)

    def costs(self) -> dict[str, Any]:
        """Return what metrics.json says of the network's size, its training's time and its memory."""
        return training_costs(self.net, self.cost)

    def gathered(self, items: dict[Any, T]) -> dict[Any, T]:
        """Return the entries of all processes, sorted by their keys. A sampler that fills up its
        last batch gives a sample to two processes: equal keys count once."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            gathered: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(gathered, items)
            items = {key: value for each in gathered for key, value in each.items()}
        return dict(sorted(items.items()))

    def gather_lines(self) -> None:
        """Gather the failures, those of the data's files among them, and notes of all processes."""
        self.failures = list(self.gathered({line: line for line in [*self.failures, *self.data().unreadable]}))
        self.notes = list(self.gathered({line: line for line in self.notes}))
