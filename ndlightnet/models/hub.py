"""Networks that are saved to a folder or a repository of the Hugging Face Hub, and loaded again.

A folder has the files of huggingface_hub's PyTorchModelHubMixin: config.json (the arguments),
model.safetensors (the weights, tied ones once) and README.md (the model card).
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ndlightnet.models.card import model_card
from ndlightnet.models.config import SAME, Configured
from ndlightnet.models.weights import adapt_in_chans, load_weights, read_checkpoint
from ndlightnet.nn.initial import Device
from ndlightnet.nn.mixers.names import customs
from ndlightnet.version import __version__

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
# beside the arguments in config.json; the last is for transformers, see integrations.transformers_lm
CLASS, VERSION, TYPE = "_class_name", "_ndlightnet_version", "model_type"
Net = TypeVar("Net", bound="Pretrained")


class Pretrained(Configured):
    """Base class of networks with `save_pretrained`, `from_pretrained`, `push_to_hub` and `from_checkpoint`."""

    # arguments for whose sake a head is new: {argument: beginning of the names of its weights}
    head_of: ClassVar[dict[str, str]] = {}
    adapts_channels = False  # whether weights for another number of input channels can be adapted

    @property
    def pipeline_tag(self) -> str | None:
        """The Hub's name of the network's task, None if there is none."""
        return None

    def description(self) -> dict[str, Any]:
        """Return what config.json holds: class, version and arguments. Raises ValueError if a
        method has changed the network to what no arguments describe."""
        if beyond := vars(self).get("_beyond"):
            raise ValueError(
                f"{type(self).__name__} was changed to {beyond}, which no argument describes: "
                "expected one as its constructor makes it; save its state_dict"
            )
        name = type(self).__name__.removeprefix("FSDP")  # which torch's fully_shard puts before it
        return {CLASS: name, VERSION: __version__, TYPE: name.lower(), **self.config}

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        license: str | None = None,
        data: str | Sequence[str] | None = None,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        pipeline_tag: str | None = None,
        repo_id: str | None = None,
    ) -> Path:
        """Write config.json, model.safetensors and README.md, each whole or not at all. Return the folder.

        The other arguments are for the model card: license: its name on the Hub, such as "apache-2.0". data: what the
        network was trained on, sentences or names of data sets.
        metrics: results by name. pipeline_tag: default: by the kind of network. repo_id: for the example. A README.md
        that is there stays, unless one of these is given.
        Needs safetensors and huggingface_hub. Raises ValueError for parameters that FSDP has split among processes.
        """
        save, card_data = _needed("safetensors.torch").save_file, _needed("huggingface_hub").ModelCardData
        if split := [name for name, p in self.named_parameters() if hasattr(p, "full_tensor")]:
            raise ValueError(
                f"{split[0]} is split among processes (DTensor): expected whole parameters, such "
                "as those of a network that loaded get_model_state_dict(net, options="
                "StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint"
            )
        text = json.dumps(self.description(), indent=2) + "\n"
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = self._untied()
        _write(folder / WEIGHTS, lambda draft: save(weights, str(draft), {"format": "pt"}))
        _write(folder / CONFIG, lambda draft: draft.write_text(text, "utf-8"))
        if license or data or metrics or tags or repo_id or not (folder / CARD).exists():
            card = model_card(
                type(self).__name__,
                repo_id,
                card_data,
                [data] if isinstance(data, str) else data or (),
                metrics or {},
                license=license,
                tags=tags,
                pipeline_tag=pipeline_tag or self.pipeline_tag,
            )
            _write(folder / CARD, lambda draft: draft.write_text(card, "utf-8"))
        return folder

    def _untied(self) -> dict[str, Tensor]:
        """Return the state dict with tied weights once, by their first name. (safetensors' own
        save_model takes one name or the other, and its files differ from run to run.)"""
        first: dict[int, str] = {}
        state = self.state_dict(keep_vars=True)
        for key, x in state.items():
            first.setdefault(id(x), key)
        return {key: state[key].detach().contiguous() for key in first.values()}

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload of an ndlightnet network",
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        **card: Any,
    ) -> str:
        """Upload the files of `save_pretrained` to a repository of the Hub, in one commit; it is
        made if needed. Return the commit's URL.

        private, token, revision (a branch), create_pr: as in huggingface_hub. card: arguments of
        `save_pretrained` for the model card. Needs huggingface_hub and safetensors.
        """
        api = _needed("huggingface_hub").HfApi(token=token)
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, repo_id=repo_id, **card)
            repo_id = api.create_repo(repo_id=repo_id, private=private, exist_ok=True).repo_id
            options = {"commit_message": commit_message, "revision": revision, "create_pr": create_pr}
            return str(api.upload_folder(repo_id=repo_id, repo_type="model", folder_path=folder, **options))

    @classmethod
    def from_pretrained(
        cls: type[Net],
        name: str | Path,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        **arguments: Any,
    ) -> Net:
        """Load a network from a folder of `save_pretrained`, or from a repository of the Hub, in evaluation mode.

        name: folder, or "user/name". device, dtype: where to and what as; default: the CPU, the dtype of the weights.
        revision, token, cache_dir, local_files_only, force_download: of the download. arguments: of the constructor, in
        place of those in config.json, such as drop_path_rate; a mixer that is not of ndlightnet has to be given. With
        another number of classes the head is new, and a warning says so; with other input channels the first layer is
        adapted as in timm, see `models.weights.adapt_in_chans`.
        Raises ValueError, one line, for weights that do not fit, FileNotFoundError for files that are not there.
        Nothing is imported that a file names.
        """
        folder = Path(name)
        if not folder.is_dir():
            if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)):
                raise FileNotFoundError(f"{name}: no such folder, and no name of a repository")
            download = _needed("huggingface_hub").snapshot_download
            folder = Path(
                download(
                    str(name),
                    revision=revision,
                    token=token,
                    cache_dir=cache_dir,
                    local_files_only=local_files_only,
                    force_download=force_download,
                    allow_patterns=[CONFIG, WEIGHTS],
                )
            )
        for file in (CONFIG, WEIGHTS):
            if not (folder / file).is_file():
                raise FileNotFoundError(f"{name}: has no {file}, expected one of save_pretrained")
        try:
            config = json.loads((folder / CONFIG).read_text("utf-8-sig"))
        except ValueError as error:
            raise ValueError(f"{folder / CONFIG}: not JSON ({error})") from error
        weights = _needed("safetensors.torch").load_file(folder / WEIGHTS)
        return cls._restored(name, config, weights, device, dtype, arguments)

    @classmethod
    def from_checkpoint(
        cls: type[Net], path: str | Path, *, device: Device = None, dtype: torch.dtype | None = None, **arguments: Any
    ) -> Net:
        """Load the network of a training, such as "runs/x/checkpoints/last.ckpt", in evaluation
        mode; with the averaged weights if the training averaged.

        arguments: of the constructor, in place of those in the checkpoint, as in
        `from_pretrained`. Where the checkpoint has none, all that are not defaults are needed.
        Raises ValueError or FileNotFoundError, one line. Lightning is not needed.
        """
        config, weights = read_checkpoint(path)
        if config is None:
            if not arguments:
                raise ValueError(
                    f"{path}: does not say its network's arguments; expected them here, "
                    f"{cls.__name__}.from_checkpoint(path, dims=..., ...)"
                )
            config = {}
        return cls._restored(path, config, weights, device, dtype, arguments)

    @classmethod
    def _restored(
        cls: type[Net],
        source: object,
        config: Any,
        weights: dict[str, Tensor],
        device: Device,
        dtype: torch.dtype | None,
        arguments: dict[str, Any],
    ) -> Net:
        """Return a network with the arguments and weights of a file."""
        if not isinstance(config, dict):
            raise ValueError(f"{source}: a config that is no dictionary")
        kind = config.get(CLASS, cls.__name__)
        if kind != cls.__name__:
            raise ValueError(f"{source}: holds a {kind}, expected a {cls.__name__}")
        saved = {k: x for k, x in config.items() if k not in (CLASS, VERSION, TYPE)}
        if "transformers_version" in config:  # written by transformers, with arguments of its own
            saved = {k: x for k, x in saved.items() if k in signature(cls).parameters}
        for name, value in saved.items():
            if name not in arguments and (lost := customs(value)):
                raise ValueError(
                    f"{source}: {name} was {', '.join(lost)}, which is not of ndlightnet; expected "
                    f"it as an argument, {name}=..."
                )
        for pair in SAME:  # the other name of an argument is that argument
            for name, alias in (pair, pair[::-1]):
                if alias in arguments and name in saved and alias not in saved:
                    arguments[name] = arguments.pop(alias)
        try:
            net = cls(**{**saved, **arguments})
        except TypeError as error:
            raise ValueError(f"{source}: {error}") from error
        changed = {k: x for k, x in arguments.items() if k in saved and x != saved[k]}
        if cls.adapts_channels and not changed.keys().isdisjoint(("in_chans", "in_channels")):
            weights = adapt_in_chans(weights, net)
        fresh = []
        for name, head in cls.head_of.items():
            old, new = (
                {k: x.shape for k, x in state.items() if k.startswith(head)} for state in (weights, net.state_dict())
            )
            if name in changed and old != new:
                fresh.append(head)
                warnings.warn(
                    f"{source}: {name}={arguments[name]}, saved with {saved[name]}: the head is "
                    f"{'new and untrained' if arguments[name] else 'left out'}",
                    stacklevel=3,
                )
        load_weights(net, weights, source, fresh)
        dtypes = {x.dtype for x in weights.values() if x.is_floating_point()}
        if dtype is None and len(dtypes) == 1:
            dtype = dtypes.pop()
            # the file's numbers as they are, which float32 would have rounded
            if torch.finfo(dtype).bits > 32:
                load_weights(net.to(dtype), weights, source, fresh)
        moved: nn.Module = net.to(device=device, dtype=dtype)
        return moved.eval()  # type: ignore[return-value]


def _needed(name: str) -> Any:
    """Import a package that `import ndlightnet` does without."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.split(".")[0]
        raise ImportError(f"{package} is needed here: pip install {package}") from error


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file beside `path`, and rename it: `path` is whole at any time."""
    draft = path.with_name(f".{os.getpid()}.part.{path.name}")
    try:
        write(draft)
        with draft.open("rb+") as file:  # or the name could reach the disk before the content
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
