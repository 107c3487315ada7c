"""Every config builds, takes one step, and agrees with its data; so does each row of compare."""

import importlib.util
import re
import sys
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from ndlightnet import NDLightNet, training
from ndlightnet.__main__ import DOORS, _load
from ndlightnet.data.folders import class_names, find_root
from ndlightnet.data.image.image_sets import read_images
from ndlightnet.data.made import moving_phantoms, pathfinder
from ndlightnet.data.made.digits import DIGITS, MOTIONS
from ndlightnet.data.made.notes import VOCABULARY
from ndlightnet.data.made.phantoms import LABELS
from ndlightnet.data.made.shapes import SHAPES
from ndlightnet.data.packing import PackCollate, PadCollate
from ndlightnet.data.series.regular_series import read_series
from ndlightnet.data.signal.recordings import read_recordings
from ndlightnet.data.text.tokenizer import load_tokenizer
from ndlightnet.data.video.video_files import read_video_folder
from ndlightnet.data.volume.datasets import read_dataset
from ndlightnet.nn import mixers
from ndlightnet.training.core.optim import adamw
from ndlightnet.training.generation.latents import Pixels
from ndlightnet.training.language.masked_data import HiddenTokens
from ndlightnet.training.language.text_cls_task import TextClsTask
from ndlightnet.training.language.tokenized import TokenizedData

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
# of each folder of networks: the config that they are laid over
BASES = {
    "series": "moving_phantoms",
    "generation": "handwritten_gen",
    "summaries": "made_notes",
    "clouds": "made_shapes",
    "forecasts": "ett",
    "videos": "surveillance",
    "volumes": "hippocampus",
}
OVERLAYS = [file for folder in BASES for file in sorted((ROOT / f"tasks/evidence/configs/{folder}").glob("*.yaml"))]
# of each command: its task and the class that its data must have; a config's is the first whose class its data have
PAIRS = sorted(
    ((_load(door.task), _load(door.data)) for door in DOORS.values()), key=lambda pair: -len(pair[1].__mro__)
)
# of configs that end in these words: the task, for any of the labelled data
ANY = {"gen": training.GenerationTask, "pretrain": training.PretrainTask}
each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)


def rows() -> dict[str, list[str]]:
    spec = importlib.util.spec_from_file_location("compare", ROOT / "tasks/evidence/compare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ROWS


def class_of(path: str) -> type:
    return getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2])


@each_config
def test_a_command_takes_the_data_of_a_config(config):
    data = class_of(yaml.safe_load(config.read_text())["data"]["class_path"])
    taken = any(issubclass(data, pair[1]) for pair in PAIRS)
    assert taken, f"{config.name}: no folder of ndlightnet/training names a command for {data.__name__} in COMMANDS"


@pytest.fixture
def build(tmp_path, monkeypatch):
    """build(config, *overrides): the command line with its model, of two blocks at most unless the overrides have
    others, data and trainer, not run. Networks of words are 64 wide; language models have three blocks: their mixer
    has windows in every third layer."""

    def command_line(config: Path, *overrides: str) -> training.TaskCLI:
        read = yaml.safe_load(config.read_text())
        data, net = class_of(read["data"]["class_path"]), read["model"]["net"]
        sizes = signature(class_of(net["class_path"])).parameters
        sizes = {name: x.default for name, x in sizes.items()} | net.get("init_args", {})
        most = {"depth": 3 if issubclass(data, training.TextData) else 2, "decoder_depth": 2}
        most |= {"embed_dim": 64} if issubclass(data, TokenizedData) else {}
        shrunk = {name: n for name, n in most.items() if isinstance(sizes.get(name), int) and sizes[name] > n}
        shallow = [f"--model.net.init_args.{name}={n}" for name, n in shrunk.items()]
        pair = next(pair for pair in PAIRS if issubclass(data, pair[1]))
        task = ANY.get(config.stem.rsplit("_")[-1])
        args = ["--config", str(config), f"--trainer.default_root_dir={tmp_path / 'out'}"]
        monkeypatch.setattr(sys, "argv", ["task.py"])
        pair = pair if task is None else (task, training.LabelledData)
        return training.TaskCLI(*pair, run=False, args=[*args, "--trainer.accelerator=cpu", *shallow, *overrides])

    return command_line


def batch_for(cli: training.TaskCLI):
    """A random batch of what the config's data give, with few cells: 16 a side, 4 frames."""
    task, data, net = cli.model, cli.datamodule, cli.model.net
    labels = torch.arange(2)
    if isinstance(task, training.TextTask):
        return torch.randint(net.vocab_size, (2, 33))
    if isinstance(task, training.MaskedTextTask):
        tokenizer = SimpleNamespace(vocab_size=net.vocab_size, mask=1)
        items = HiddenTokens(torch.randint(net.vocab_size, (2, 32)), data.hidden, tokenizer)
        return data.collate([items[0], items[1]])
    if isinstance(task, TextClsTask):
        words = [torch.randint(net.vocab_size, (n,)) for n in (9, 14)]
        return PackCollate(None)([(x, float(i) if task.regression else i, i) for i, x in enumerate(words)])
    if isinstance(task, training.SummaryTask):
        words = [torch.randint(net.vocab_size, (n,)) for n in (9, 14)]
        return data.collate([(x, x[:5], i) for i, x in enumerate(words)])
    if isinstance(task, training.TTSTask):
        return data.collate([(torch.randint(256, (n,)), torch.randn(3 * n, net.bands), i) for i, n in ((0, 9), (1, 7))])
    if isinstance(task, training.CompletionTask):
        return data.collate(
            [(torch.randn(n, 3), torch.randn(20, 3), torch.tensor(1.0), i) for i, n in ((0, 9), (1, 9))]
        )
    if isinstance(task, training.PointClsTask):
        return data.collate([(torch.randn(n, 3), i, i) for i, n in enumerate((9, 14))])
    if isinstance(task, training.PretrainTask):
        return torch.randn(2, net.in_chans, *[16] * net.dims), None, None
    if isinstance(task, training.ForecastTask):
        columns = net.in_chans
        data.columns = (*map(str, range(columns - 1)), "OT")  # as after `setup`
        data.targets = tuple(data.chosen_targets or data.columns)
        values = torch.randn(2, data.input_length, columns)
        return values, torch.rand(2, data.input_length + 40, 4), torch.randn(2, 40, columns), labels
    if isinstance(task, training.SignalTask):
        collate = PackCollate(net.embed.patch) if data.batching == "packed" else PadCollate()
        return collate([(torch.randn(net.in_chans, n), i, i) for i, n in enumerate((9, 14))])
    if isinstance(task, training.VideoTask):
        return torch.randn(2, 3, min(data.frames, 4), 16, 16), labels % net.num_classes, labels
    if isinstance(task, training.SegmentationTask):
        space = [min(side, 16) for side in data.patch]
        return torch.randn(2, net.in_channels, *space), torch.randint(net.out_channels, (2, 1, *space)), labels
    return torch.randn(2, net.in_chans, *[4] * net.dims), labels, labels


def one_step(cli: training.TaskCLI, batch: object = None) -> None:
    """The loss is finite, every parameter gets a gradient, and those with one move."""
    task = cli.model.train()
    task._trainer = SimpleNamespace(
        estimated_stepping_batches=20,
        num_training_batches=5,
        accumulate_grad_batches=1,
        datamodule=cli.datamodule,
        strategy=SimpleNamespace(broadcast=lambda value: value),
    )
    task.log = lambda *_, **__: None
    if isinstance(task, training.GenerationTask):
        task.codec, task.space = Pixels(cli.datamodule), (4,) * task.net.dims
        for value in task.net.parameters():  # else the zeros let nothing through
            torch.nn.init.normal_(value, std=0.02) if not value.any() else None
    optimizer = adamw(task, task.net)["optimizer"]
    before = {name: value.detach().clone() for name, value in task.net.named_parameters()}
    loss = task.training_step(batch_for(cli) if batch is None else batch, 0)
    assert loss.ndim == 0 and loss.isfinite()
    loss.backward()
    optimizer.step()
    for name, value in task.net.named_parameters():
        assert value.isfinite().all()
        if value.requires_grad:
            assert value.grad is not None and value.grad.isfinite().all(), name
            assert not torch.equal(value, before[name]) or not value.grad.any(), name
    moved = [n for n, v in task.net.named_parameters() if not torch.equal(v, before[n])]
    assert len(moved) > 0.9 * len(before)


@pytest.mark.slow
@each_config
def test_a_config(build, config):
    """It builds what it names, takes a step, ends with a validation, writes into its own folder, and agrees with its
    data."""
    cli, read = build(config), yaml.safe_load(config.read_text())
    net = read["model"]["net"]
    class_of(net["class_path"])(**net.get("init_args", {}), device="meta")  # in its own size
    assert type(cli.model.net).__name__ == net["class_path"].rsplit(".")[-1]
    assert type(cli.datamodule).__name__ == read["data"]["class_path"].rsplit(".")[-1]
    assert cli.model.lr == read["model"].get("lr", 1e-3)
    # otherwise the epochs of the lowest rates are never candidates for best.ckpt
    assert cli.trainer.max_epochs % cli.trainer.check_val_every_n_epoch == 0
    place = config.relative_to(ROOT / "configs").with_suffix("")
    assert read["trainer"]["default_root_dir"] == f"runs/{place}"
    saved = cli.parser.dump(cli.config, skip_none=False)  # what lies beside the checkpoints
    assert "Unable to serialize" not in saved
    assert config.read_text().startswith("# ") and len(config.read_text().splitlines()) <= 40
    one_step(cli)
    agrees_with_its_data(cli, config.read_text())


DRAWN = {
    "PhantomVolumes": LABELS,
    "MovingPhantoms": moving_phantoms.LABELS,
    "MovingDigits": MOTIONS,
    "ColouredDigits": DIGITS,
    "HandwrittenDigits": DIGITS,
    "Pathfinder": pathfinder.CLASSES,
    "ShapeClasses": tuple(SHAPES),
}


def tokens_of(data: training.TextData | training.SummaryData, config: str) -> int | None:
    """The size of the vocabulary of a config's data, which it names or with which its comment makes them; None if it
    is not here."""
    made = re.search(r"tokenize .*--(tokenizer|train) (\S+)", config)
    source = data.tokenizer_source or (made[2] if made else "bytes")
    if source.isdigit():
        return int(source)
    here = source == "bytes" or find_root(source).exists()
    return load_tokenizer(source).vocab_size if here else None


def agrees_with_its_data(cli: training.TaskCLI, config: str) -> None:
    """The channels and classes of the network are those of the data, where these are here."""
    net, task, data = cli.model.net, cli.model, cli.datamodule
    root, classes = ROOT / getattr(data, "root", "none"), DRAWN.get(type(data).__name__)
    if isinstance(data, training.TextData):
        assert net.causal == isinstance(task, training.TextTask) and net.per_token
        assert net.vocab_size >= (tokens_of(data, config) or 0)
    elif isinstance(task, TextClsTask):
        assert not net.per_token and (net.num_classes == 1) == task.regression
    elif isinstance(data, training.SummaryData):
        tokens = VOCABULARY if isinstance(data, training.MadeNotes) else tokens_of(data, config)
        assert net.vocab_size >= (tokens or 0)
    elif isinstance(task, training.TTSTask):
        assert (net.vocab_size, net.bands) == (256, data.scale.bands)
    elif isinstance(task, training.CompletionTask):
        assert not isinstance(data, training.MadeShapes) or net.points == (1 - data.keep) * data.points
    elif isinstance(task, training.PointClsTask):
        assert (net.dims, net.in_chans, net.num_classes) == (3, 3, len(classes))
    elif classes is None and not root.exists():
        return
    elif isinstance(data, training.ImageFolders):
        if classes is None and not (root / "train").is_dir():
            return
        classes = classes or class_names(root / "train")
        classes = () if isinstance(task, training.PretrainTask) else classes
        assert (net.dims, net.in_chans, net.num_classes) == (2, data.channels, len(classes))
    elif isinstance(task, training.GenerationTask):
        assert net.num_classes == len(classes or data.classes) and net.in_chans == data.channels
    elif isinstance(task, training.ImageTask):
        images = read_images(root)["train"]
        assert net.dims == images.images.ndim - 1 and net.in_chans == 1
        assert net.num_classes == len(data.classes) == len(images.labels.unique())
    elif isinstance(task, training.ForecastTask) and (root / data.file).exists():
        assert len(read_series(root / data.file, data.chosen_columns).columns) == net.in_chans
    elif isinstance(task, training.SignalTask):
        assert (net.in_chans, net.num_classes) == (data.channels, len(set(read_recordings(root).digits)))
    elif isinstance(task, training.VideoTask):
        classes = classes or read_video_folder(root).classes
        assert (net.in_chans, net.num_classes) == (data.channels, len(classes))
    elif isinstance(task, training.SegmentationTask) and classes is None:
        folder = read_dataset(root)
        assert (net.in_channels, net.out_channels) == (len(folder.channels), len(folder.labels))
    elif isinstance(task, training.SegmentationTask):
        assert net.out_channels == len(classes)


@pytest.mark.parametrize("folder", ["glue"])
def test_configs_that_begin_with_the_weights_of_another_have_its_network(folder):
    for config in sorted((ROOT / "configs" / folder).glob("*.yaml")):
        model = yaml.safe_load(config.read_text())["model"]
        before = ROOT / "configs" / f"{Path(model['init']).parts[1]}.yaml"
        ours, theirs = model["net"]["init_args"], yaml.safe_load(before.read_text())["model"]["net"]["init_args"]
        assert all(ours[name] == theirs[name] for name in ("dims", "vocab_size", "embed_dim", "depth")), config
        assert ours.get("mixer", "LightNetAttention") == theirs.get("mixer", "").rsplit(".")[-1]


@pytest.mark.parametrize(
    "stem, millions", [("wikitext103", 45.07), ("lm_150m", 144.8), ("lm_385m", 378.6), ("lm_1b", 1009), ("lm_3b", 2960)]
)
def test_language_models_are_as_large_as_those_of_the_paper(stem, millions):
    options = yaml.safe_load((ROOT / "configs" / f"{stem}.yaml").read_text())["model"]["net"]["init_args"]
    net = NDLightNet(**options, device="meta")
    assert sum(value.numel() for value in net.parameters()) == pytest.approx(millions * 1e6, rel=0.01)


def leaves(config: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(config, dict) or not config:
        return {prefix: config}
    return {name: x for key, value in config.items() for name, x in leaves(value, f"{prefix}.{key}").items()}


@pytest.mark.slow
@pytest.mark.parametrize("network", OVERLAYS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_network_laid_over_a_config_takes_one_step(build, network):
    """What it says holds, all else stays as the config has it."""
    base = ROOT / "configs" / f"{BASES[network.parent.name]}.yaml"
    cli, plain = build(base, "--config", str(network)), build(base)
    overlay = yaml.safe_load(network.read_text())
    stated = {name for section in ("data", "model") for name in leaves(overlay.get(section, {}), f".{section}")}
    ours, theirs = ({n: x for n, x in leaves(c.config.as_dict()).items() if ".net." not in n} for c in (cli, plain))
    changed = {name for name in ours | theirs if ours.get(name) != theirs.get(name)}
    assert {name.replace(".init_args", "") for name in changed} - {".config"} <= {
        name.replace(".init_args", "") for name in stated
    }
    entry, net = overlay.get("model", {}).get("net", {}), cli.model.net
    assert type(net).__name__ == entry.get("class_path", type(plain.model.net).__name__).rsplit(".")[-1]
    options = entry.get("init_args", {})
    for name in ("in_chans", "in_channels", "out_channels", "num_classes", "strides", "deep_supervision"):
        if name not in options and hasattr(net, name) and hasattr(plain.model.net, name):
            assert getattr(net, name) == getattr(plain.model.net, name), name
    mixer = options.get("mixer")
    if mixer is not None:
        name = (mixer if isinstance(mixer, str) else mixer["class_path"]).rsplit(".")[-1]
        used = [module for module in net.modules() if type(module) is getattr(mixers, name)]
        local = mixers.WithLocal  # which has a mixer inside
        blocks = [module for module in net.modules() if hasattr(module, "mixer") and not isinstance(module, local)]
        readers = [x for x in net.modules() if type(getattr(x, "cross", None)) is getattr(mixers, name)]
        assert len(used) - len(readers) == len(blocks) > 0
    if type(net).__name__ != "TorchvisionVideo":  # slow on a CPU
        one_step(cli, batch_for(plain) if network.parent.name == "series" else batch_for(cli))


# rows with an option that only some tasks have
ONLY = {"axis-causal": "digits", "padded": "spoken_digits"}


@pytest.mark.parametrize(
    "stem, row",
    [(stem, row) for stem in ("phantoms", "digits", "spoken_digits") for row in rows() if ONLY.get(row, stem) == stem],
)
def test_row_of_the_comparison(build, stem, row):
    """A row changes the one thing that it is named for, and the network still learns."""
    cli = build(ROOT / "configs" / f"{stem}.yaml", *rows()[row])
    net = cli.model.net
    kinds = {"softmax attention": "SoftmaxAttention", "identity mixer": "Identity"}
    kind = kinds.get(row, "LightNetAttention")
    stages = [stage for stage in getattr(net, "stages", [net]) if stage.blocks]
    used = [block.mixer for stage in stages for block in stage.blocks]
    assert {type(mixer) for mixer in used} == {getattr(mixers, kind)}
    assert all((stage.tpe is None) == (row == "without MD-TPE") for stage in stages)
    if kind == "LightNetAttention":
        assert all((mixer.lrpe is None) == (row == "without MD-LRPE") for mixer in used)
    assert getattr(net, "causal", False) == (row == "axis-causal")
    if stem == "spoken_digits":
        assert cli.datamodule.batching == ("padded" if row == "padded" else "packed")
    one_step(cli)


def test_a_row_for_volumes_rejects_frames(build):
    """What a config has no option for is refused, not passed over."""
    with pytest.raises(SystemExit):
        build(ROOT / "configs" / "phantoms.yaml", "--data.init_args.frames=1")


@pytest.mark.parametrize("name", ["cifar10", "fashion_mnist"])
def test_generated_images_are_compared_in_a_classifier_of_the_same_data(build, name):
    pytest.importorskip("timm")
    folder = ROOT / "tasks/evidence/configs/features"
    classifier = build(folder / f"{name}.yaml")
    read = yaml.safe_load((folder / f"{name}.yaml").read_text())
    cli = build(ROOT / "configs" / f"{name}_gen.yaml", "--config", str(folder / f"{name}_gen.yaml"))
    features, checkpoint, _ = cli.model.classifier
    assert checkpoint == f"{read['trainer']['default_root_dir']}/checkpoints/last.ckpt"
    shapes = [{k: x.shape for k, x in n.state_dict().items()} for n in (features, classifier.model.net)]
    assert shapes[0] == shapes[1] and features.num_classes == cli.model.net.num_classes
    assert features.conv1.in_channels == cli.model.net.in_chans
    assert type(cli.datamodule) is type(classifier.datamodule)
