"""Forecasts: scaling and windows of the data module, fit, test and predict, errors, the config."""

import json
import re
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from ndlightnet.data.errors import DataError
from ndlightnet.data.series.regular_series import read_series, write_series
from ndlightnet.models.forecaster import Forecaster
from ndlightnet.training import ForecastTask, SeriesData
from ndlightnet.training.forecasting import forecast_task
from ndlightnet.training.forecasting.forecast_task import quantile_loss
from tests.training.conftest import fit_and_test, last, launcher, set_up

START = datetime(2020, 1, 1, 5)
SPLIT = (500, 600, 720)
CONFIG = """
seed_everything: 0
trainer:
  {accelerator: cpu, max_epochs: 10, enable_progress_bar: false, check_val_every_n_epoch: 2,
   log_every_n_steps: 5}
model:
  lr: 2.0e-2
  net:
    class_path: ndlightnet.models.forecaster.Forecaster
    init_args: {in_chans: 2, label_length: 24, embed_dim: 16, depth: 1}
data:
  class_path: ndlightnet.training.SeriesData
  init_args:
    {root: nowhere, file: hours.csv, input_length: 48, horizon: 30, split: [500, 600, 720],
     batch_size: 32, workers: 0}
"""


def dates(rows: int) -> pd.DatetimeIndex:
    return pd.date_range(START, periods=rows, freq="h")


def days(rows: int = 750) -> torch.Tensor:
    """Two columns of a daily pattern, different hours of it, and noise of 0.3 of its deviation."""
    rng = np.random.default_rng(0)
    turn = 2 * np.pi * (np.arange(rows)[:, None] / 24 + np.array([0.0, 0.3]))
    values = np.array([10.0, -3.0]) + np.array([4.0, 0.5]) * (np.sin(turn) * 2**0.5 + 0.3 * rng.normal(size=(rows, 2)))
    return torch.from_numpy(values)


def write_days(path: Path, values: torch.Tensor, columns: tuple[str, ...] = ("A", "OT")) -> Path:
    write_series(path, columns, dates(len(values)), values)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("series")
    write_days(folder / "hours.csv", days())
    return folder


foresee = launcher(ForecastTask, SeriesData, CONFIG)


@pytest.fixture(scope="module")
def trained(foresee, folder, tmp_path_factory) -> Path:
    """The folder of a finished fit and test."""
    out = tmp_path_factory.mktemp("trained")
    assert "over 91 windows" in fit_and_test(foresee, root=folder, out=out).out
    assert matplotlib.image.imread(out / "test_windows.png").std() > 0.05
    return out


def net_of(checkpoint: Path) -> Forecaster:
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    net = Forecaster(2, 24, embed_dim=16, depth=1).eval()
    net.load_state_dict({name.removeprefix("net."): value for name, value in weights.items()})
    return net


def series_data(folder: Path, **options) -> SeriesData:
    small = {"file": "hours.csv", "input_length": 48, "horizon": 30, "split": SPLIT, "workers": 0}
    return SeriesData(str(folder), **small | options)


def opened(folder: Path, **options) -> SeriesData:
    data = series_data(folder, **options)
    data.setup("fit")
    return data


def test_scaled_by_the_training_rows_alone(folder, tmp_path, close):
    values = read_series(folder / "hours.csv").values
    values[500:] = torch.rand(250, 2) * 1e4
    write_days(tmp_path / "hours.csv", values)
    plain, changed = opened(folder), opened(tmp_path)
    mean, deviation = plain.scale
    close(mean, values[:500].mean(0), 1e-12)
    close(deviation, values[:500].std(0, correction=0), 1e-12)
    assert torch.equal(mean, changed.scale[0]) and torch.equal(deviation, changed.scale[1])
    assert len(plain.train_set) == len(changed.train_set) == 500 - 78 + 1
    for mine, theirs in zip(plain.train_set[422], changed.train_set[422], strict=True):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))
    rows = torch.stack([plain.train_set[i][0][0] for i in range(423)])
    close(plain.unscaled(rows), values[:423], 1e-6)


def test_an_input_ends_where_its_target_begins(folder, tmp_path):
    """What a test window is asked for can be anything: its input stays, and the forecast."""
    values, first = read_series(folder / "hours.csv").values, 600
    values[first:] += 100
    write_days(tmp_path / "hours.csv", values)
    window, changed = (opened(place).test_set[0] for place in (folder, tmp_path))
    assert all(torch.equal(window[i], changed[i]) for i in (0, 1)) and (changed[2] > window[2] + 10).all()
    for split, end in (("val_set", 600), ("test_set", 720)):
        windows = getattr(opened(folder), split)
        assert windows.starts.stop - 1 + 78 == end and windows.starts[0] + 48 == end - len(windows) - 29


@pytest.mark.slow
def test_metrics_by_hand(trained, folder):
    """Every window, hour and column, in the space of the training rows' mean and deviation."""
    metrics = json.loads((trained / "metrics.json").read_text())
    table = np.loadtxt(folder / "hours.csv", delimiter=",", skiprows=1, usecols=(1, 2))
    scaled = (table - table[:500].mean(0)) / table[:500].std(0)
    net, differences = net_of(last(trained)), {}
    data = opened(folder)
    for i, first in enumerate(range(600, 720 - 30 + 1)):
        before, after = scaled[first - 48 : first], scaled[first : first + 30]
        with torch.no_grad():
            guess = net(torch.tensor(before[None]).float(), data.test_set[i][1][None])[0].numpy()
        day = np.arange(30) % 24
        simple = {"last_value": before[-1:], "last_season": before[-24:][day]}
        simple["mean_season"] = (before[:24] + before[24:])[day] / 2
        for name, y in {"net": guess, **simple}.items():
            differences.setdefault(name, []).append(y - after)
    for name, errors in differences.items():
        values = metrics if name == "net" else metrics[name]
        assert values["mse"] == pytest.approx(np.square(errors).mean(), rel=1e-4)
        assert values["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-4)
    assert metrics["windows"] == 91 and metrics["columns"] == ["A", "OT"]
    assert (metrics["input_length"], metrics["horizon"]) == (48, 30)
    assert metrics["parameters"] == sum(p.numel() for p in net.parameters())
    assert metrics["steps"] == 10 * ((500 - 78 + 1) // 32) and metrics["step_ms"] > 0
    best = metrics["fit"]["best"]
    assert best["val_score"] == -best["val_mse"] >= metrics["fit"]["last"]["val_score"]
    values, times, target, _ = zip(*(data.val_set[i] for i in range(len(data.val_set))), strict=True)
    with torch.no_grad():
        mse = (net(torch.stack(values), torch.stack(times)) - torch.stack(target)).square().mean()
    assert len(values) == 71 and metrics["fit"]["last"]["val_mse"] == pytest.approx(mse.item(), rel=1e-4)


@pytest.mark.slow
def test_a_daily_pattern_is_learnt(trained):
    """The noise's share of the variance is 0.09 / 1.09 = 0.083: nothing can be better. Repeating
    adds the noise of the day repeated to it, that of the mean of two days half of it."""
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["last_value"]["mse"] > 0.5
    assert metrics["last_season"]["mse"] == pytest.approx(2 * 0.083, rel=0.2)
    assert metrics["mean_season"]["mse"] == pytest.approx(1.5 * 0.083, rel=0.2)
    assert 0.06 < metrics["mse"] < 0.85 * metrics["last_season"]["mse"]


@pytest.mark.slow
def test_predict(foresee, trained, folder, tmp_path, close):
    """In the file's units, of the hours after its end, without the training data; columns may come
    in another order, beside others."""
    values = days(200)
    swapped = torch.stack([values[:, 1], values[:, 0] * 0, values[:, 0]], 1)
    write_days(tmp_path / "now.csv", swapped, ("OT", "B", "A"))
    places = {"out": tmp_path / "out", "input": tmp_path / "now.csv", "root": "/gone"}
    file = tmp_path / "out" / "predictions" / "now.csv"
    assert str(file) in foresee("predict", **places, ckpt=last(trained)).well().out
    predicted = read_series(file)
    assert predicted.columns == ("A", "OT") and (predicted.dates == dates(230)[200:]).all()
    assert predicted.values.shape == (30, 2)
    data = opened(folder)
    inputs = read_series(tmp_path / "now.csv", ["A", "OT"]).values[-48:]
    windows = opened(folder, split=(100, 150, 230)).test_set  # its last one begins at row 152
    assert windows.starts[-1] == 152
    with torch.no_grad():
        net, times = net_of(last(trained)), windows[len(windows) - 1][1]
        guess = net(data.scaled(inputs)[None], times[None])
    close(predicted.values, data.unscaled(guess[0]), 1e-5)
    truth = days(230)[200:]
    assert ((predicted.values - truth).abs().mean(0) < truth.std(0)).all()
    assert matplotlib.image.imread(file.with_suffix(".png")).std() > 0.05


def test_quantile_loss():
    """Its least value for a constant is at the quantile of the targets."""
    targets = torch.arange(101.0)
    guesses = torch.arange(0, 101, 0.5)
    for level in (0.1, 0.5, 0.9):
        losses = [quantile_loss(guess.expand(101, 1), targets, [level]).mean() for guess in guesses]
        assert guesses[int(torch.stack(losses).argmin())] == pytest.approx(100 * level, abs=0.51)
    loss = quantile_loss(torch.tensor([[1.0, 1.0], [3.0, 3.0]]), torch.tensor([2.0, 2.0]), [0.1, 0.9])
    assert torch.allclose(loss, torch.tensor([[0.1, 0.9], [0.9, 0.1]]))


@pytest.mark.slow
def test_quantiles(foresee, folder, tmp_path, monkeypatch):
    """Errors are those of the median, the outermost quantiles hold about as many values as they say, and predictions
    have a column of each."""
    out, levels = tmp_path / "out", "[0.1,0.5,0.9]"
    panels, save = [], forecast_task.save_forecasts

    def saved(path, chosen):
        panels.extend(chosen)
        save(path, chosen)

    monkeypatch.setattr(forecast_task, "save_forecasts", saved)
    fit_and_test(foresee, f"--model.net.init_args.quantiles={levels}", root=folder, out=out)
    metrics = json.loads((out / "metrics.json").read_text())
    assert 0.6 < metrics["coverage"] < 0.95 and 0 < metrics["quantile_loss"] < metrics["mae"] / 2
    net = Forecaster.from_checkpoint(last(out))
    data = opened(folder)

    @torch.no_grad()
    def measured(windows) -> list[float]:
        """Mean square error of the median, coverage and quantile loss."""
        rows = []
        for values, times, target, _ in windows:
            forecast = net(values[None], times[None])[0]
            low, middle, high = forecast.unbind(-1)
            within = ((low <= target) & (target <= high)).double().mean()
            loss = quantile_loss(forecast, target, [0.1, 0.5, 0.9]).mean()
            rows.append(torch.stack([(middle - target).square().mean(), within, loss]))
        return torch.stack(rows).mean(0).tolist()

    values = [metrics[name] for name in ("mse", "coverage", "quantile_loss")]
    assert values == pytest.approx(measured(data.test_set), rel=1e-4)
    assert metrics["fit"]["last"]["val_mse"] == pytest.approx(measured(data.val_set)[0], rel=1e-4)
    write_days(tmp_path / "now.csv", days(200))
    places = {"out": tmp_path / "next", "input": tmp_path / "now.csv", "root": "/gone"}
    foresee("predict", f"--model.net.init_args.quantiles={levels}", **places, ckpt=last(out)).well()
    predicted = read_series(tmp_path / "next" / "predictions" / "now.csv")
    assert predicted.columns == tuple(f"{name} {level}" for name in ("A", "OT") for level in ("0.1", "0.5", "0.9"))
    assert (predicted.values.unflatten(1, (2, 3)).diff(dim=-1) >= 0).all()
    assert (predicted.values[:, 1] - days(230)[200:, 0]).abs().mean() < days(230)[200:, 0].std()
    assert len(panels) == 4 + 2  # of the test, and of a column each
    for panel in panels:
        assert (panel.band[:, 0] <= panel.forecast).all() and (panel.forecast <= panel.band[:, 1]).all()
        assert (panel.band[:, 0] < panel.band[:, 1]).any()


@pytest.mark.parametrize(
    "options, net, text",
    [
        ({"file": "gone.csv"}, {}, "{root}/gone.csv: no such file"),
        ({"columns": ["XX"]}, {}, "{root}/hours.csv: has no column XX"),
        ({"columns": ["OT"]}, {}, "{root}: expected a network with in_chans=1, got 2"),
        ({"split": (500, 600, 800)}, {}, "{root}/hours.csv: 750 rows, expected 800"),
        ({"horizon": 101}, {}, "{root}/hours.csv: split=(500, 600, 720) has no room"),
        ({}, {"label_length": 49}, "input_length=48: shorter than"),
        ({}, {"period": 49}, "input_length=48: shorter than the network's period=49"),
        ({"horizon": 0}, {}, "input_length=48, horizon=0: expected 1 row or more"),
    ],
)
def test_what_does_not_fit_the_data(folder, options, net, text):
    task = ForecastTask(Forecaster(**{"in_chans": 2, "label_length": 24, "embed_dim": 16} | net))
    with pytest.raises(DataError, match="^" + re.escape(text.format(root=folder))):
        set_up(task, series_data(folder, **options))


def test_a_split_by_fractions(folder):
    data = opened(folder, split=(0.5, 0.8, 1.0))
    assert [part.starts.stop - 1 + 78 for part in (data.train_set, data.val_set, data.test_set)] == [375, 600, 750]
    for split in ((0.5, 0.5, 1.0), (0, 5, 9)):
        with pytest.raises(DataError, match=r"data.split: .*expected three numbers in order"):
            series_data(folder, split=split)


def test_what_predict_needs(folder, tmp_path):
    write_days(tmp_path / "short.csv", days(47))
    write_series(tmp_path / "daily.csv", ("A", "OT"), pd.date_range(START, periods=60), days(60))
    write_days(tmp_path / "other.csv", days()[:, :1], ("OT",))
    for name, columns, text in (
        ("short.csv", (), "--ckpt_path: predict expects"),
        (None, ("A", "OT"), "data.input: expected a CSV file"),
        ("short.csv", ("A", "OT"), f"{tmp_path}/short.csv: 47 rows, expected input_length=48"),
        ("other.csv", ("A", "OT"), f"{tmp_path}/other.csv: has no column A"),
        ("daily.csv", ("A", "OT"), f"{tmp_path}/daily.csv: in steps of D, expected h, as in training"),
    ):
        data = series_data(folder, input=name and str(tmp_path / name))
        data.set_names({"columns": columns, "targets": columns, "known": [], "step": ["h"]})
        with pytest.raises(DataError, match=f"^{text}"):
            data.predict_dataloader()


def write_promotions(path: Path, rows: int, later: int = 0, seed: int = 0) -> torch.Tensor:
    """Sales that follow a promotion of the same row, which is known beforehand, and nothing else but noise; the last
    rows have the promotion only. Return the promotions (rows + later,)."""
    rng = np.random.default_rng(seed)
    promotion = rng.integers(0, 2, rows + later)
    sales, stock = 100 + 50 * promotion + rng.normal(size=rows + later), rng.normal(size=rows + later)
    lines = ["date,stock,promotion,sales"]
    for row, date in enumerate(dates(rows + later)):
        values = ("", promotion[row], "") if row >= rows else (f"{stock[row]:.6f}", promotion[row], f"{sales[row]:.6f}")
        lines.append(",".join(map(str, (date, *values))))
    path.write_text("\n".join(lines) + "\n")
    return torch.from_numpy(promotion)


def test_rows_with_known_columns_only(tmp_path, close):
    path = tmp_path / "a.csv"
    promotion = write_promotions(path, 60, 5)
    series = read_series(path, known=["promotion"])
    assert series.columns == ("stock", "sales") and series.values.shape == (60, 2) and len(series.dates) == 60
    assert torch.equal(series.known[:, 0], promotion.double())
    close(series.values[:, 1] - 50 * series.known[:60, 0], torch.full((60,), 100.0).double(), 0.05)
    text = path.read_text().splitlines()
    for change, message in (
        ({61: text[61].replace(",,", ",3,")}, "line 62: expected a date and 3 numbers"),  # in the middle of later rows
        ({62: text[62] + "3"}, "line 62: expected a date and 3 numbers"),  # nor may these end
        ({64: text[64][:-2] + "x,"}, "line 65"),
    ):
        (tmp_path / "b.csv").write_text("\n".join(change.get(n, line) for n, line in enumerate(text)) + "\n")
        with pytest.raises(DataError, match=message):
            read_series(tmp_path / "b.csv", known=["promotion"])
    with pytest.raises(DataError, match="line 62: expected a date and 3 numbers"):
        read_series(path, ["stock", "promotion", "sales"])
    with pytest.raises(DataError, match=r"columns=\['sales', 'sales'\]: has the column sales twice"):
        read_series(path, ["sales"], known=["sales"])
    with pytest.raises(DataError, match="are all its columns, expected others to forecast"):
        read_series(path, known=["stock", "promotion", "sales"])


@pytest.mark.slow
def test_a_target_that_follows_from_a_known_column(foresee, tmp_path):
    """Without the promotion nobody could forecast sales; and a prediction has columns of the targets only."""
    write_promotions(tmp_path / "hours.csv", 720)
    data = {"known": ["promotion"], "targets": ["sales"], "input_length": 24, "horizon": 12}
    options = {"root": tmp_path, "out": tmp_path / "out", "data": data, "net": {"covariates": 1, "label_length": 12}}
    fit_and_test(foresee, **options, trainer={"max_epochs": 20})
    results = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert results["targets"] == ["sales"] and results["columns"] == ["stock", "sales"]
    assert results["mse"] < 0.1 and results["mean_season"]["mse"] > 0.9
    promotion = write_promotions(tmp_path / "now.csv", 40, 12, seed=1)
    places = {"root": "/gone", "out": tmp_path / "out", "input": tmp_path / "now.csv", "ckpt": last(tmp_path / "out")}
    foresee("predict", **places, data={"input_length": 24, "horizon": 12}, net=options["net"]).well()
    predicted = read_series(tmp_path / "out" / "predictions" / "now.csv")
    assert predicted.columns == ("sales",)
    assert (predicted.values[:, 0] - 100 - 50 * promotion[40:]).abs().max() < 20
    write_promotions(tmp_path / "now.csv", 40, 11)
    done = foresee("predict", **places, data={"input_length": 24, "horizon": 12}, net=options["net"])
    assert "11 rows of promotion after the last values, expected horizon=12" in done.errors[0]
    done = foresee("fit", root=tmp_path, out=tmp_path / "no", data=data, net={"label_length": 12})
    assert "expected a network with covariates=1, got 0" in done.errors[0]
    done = foresee(
        "fit", root=tmp_path, out=tmp_path / "no", data=data | {"targets": ["promotion"]}, net=options["net"]
    )
    assert "data.targets: ['promotion'], expected some of stock, sales, each once" in done.errors[0]


@pytest.mark.slow
def test_quantiles_of_a_target(foresee, folder, tmp_path):
    """As those of the same network's column, when all are forecast."""
    options = {"root": folder, "net": {"quantiles": [0.1, 0.5, 0.9]}, "trainer": {"max_epochs": 2}}
    out = tmp_path / "out"
    foresee("fit", out=out, **options).well()
    places = {"input": folder / "hours.csv", "ckpt": last(out), "out": out}
    foresee("predict", **places, **options).well()
    both = read_series(out / "predictions" / "hours.csv")
    saved = torch.load(last(out), weights_only=True)
    (name,) = (key for key, value in saved.items() if isinstance(value, dict) and "targets" in value)
    saved[name]["targets"] = ["OT"]
    torch.save(saved, last(out))
    foresee("predict", **places, **options).well()
    one = read_series(out / "predictions" / "hours.csv")
    assert one.columns == ("OT 0.1", "OT 0.5", "OT 0.9") == both.columns[3:]
    assert torch.equal(one.values, both.values[:, 3:])


FILES = {  # of data sets that are not here: first date, step, rows, form of dates, windows of 720 rows to test
    "ettm1": ("2016-07-01", "15min", 69680, "%Y-%m-%d %H:%M:%S", 10801),
    "weather": ("2010-01-01", "h", 35064, "%Y-%m-%d %H:%M:%S", 6294),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_files_of_the_form_of_a_config(tmp_path, name):
    start, freq, rows, form, windows = FILES[name]
    config = yaml.safe_load((Path(__file__).parents[3] / f"configs/{name}.yaml").read_text())
    options, net = config["data"]["init_args"], config["model"]["net"]["init_args"]
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(rows, net["in_chans"])).round(3))
    table.index = pd.date_range(start, periods=rows, freq=freq, name="date").strftime(form)
    table.to_csv(tmp_path / options["file"])
    data = SeriesData(**options | {"root": str(tmp_path), "workers": 0})
    set_up(ForecastTask(Forecaster(**net)), data)
    assert len(data.test_set) == windows and data.series.step.season == net["period"]
    assert data.series.step.offset == pd.tseries.frequencies.to_offset(freq)


@pytest.mark.slow
def test_a_checkpoint_of_other_columns(trained, folder, tmp_path):
    task, data = ForecastTask(Forecaster(2, 24, embed_dim=16)), opened(folder, columns=["OT", "A"])
    task._trainer = SimpleNamespace(datamodule=data)
    saved = torch.load(last(trained), weights_only=True)
    with pytest.raises(DataError, match=r"OT.*A.*trained on"):
        task.on_load_checkpoint(saved)
