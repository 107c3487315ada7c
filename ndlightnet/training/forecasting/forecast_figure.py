"""Forecasts as curves over their dates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from torch import Tensor

from ndlightnet.training.report.figures import COLORS, GREY, panels_of, plain_axes, save_figure


class Panel(NamedTuple):
    """One column of a window, at `dates`: `inputs`, then the forecast, and the truth and a band (rows, 2) around the
    forecast if there are any."""

    title: str
    dates: pd.DatetimeIndex
    inputs: Tensor
    forecast: Tensor
    truth: Tensor | None = None
    band: Tensor | None = None


def save_forecasts(path: Path, panels: Sequence[Panel]) -> None:
    """Write a picture with one row per panel, each over its dates."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    figure, axes = panels_of(len(panels), 1, (10, 1.9 * len(panels) + 0.5))
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        now, dates = len(panel.inputs), panel.dates.to_pydatetime()
        axis.axvspan(dates[now], dates[-1], color="#F3F3F3", linewidth=0)
        if panel.band is not None:
            axis.fill_between(dates[now:], *panel.band.mT.numpy(), color=COLORS[4], alpha=0.2, linewidth=0)
        lines = (
            (dates[:now], panel.inputs, "input", GREY),
            (dates[now:], panel.truth, "truth", COLORS[0]),
            (dates[now:], panel.forecast, "forecast", COLORS[4]),
        )
        for when, values, label, color in lines:
            if values is not None:
                axis.plot(when, values.numpy(), label=label, color=color, linewidth=1.1)
        locator = AutoDateLocator()
        axis.xaxis.set_major_locator(locator)
        axis.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        axis.set_title(panel.title, loc="left", fontsize=9)
        axis.margins(x=0)
        axis.tick_params(labelsize=8)
        axis.xaxis.get_offset_text().set_size(8)
        plain_axes(axis)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    save_figure(figure, path)
