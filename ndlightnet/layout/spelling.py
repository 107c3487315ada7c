"""Which name was meant: for errors about names that do not exist. This has nothing to do with
layouts: it lies in the one room that both `data` and `nn` may import."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

# arguments that the libraries of the field give different names
SYNONYMS = (
    {"heads", "num_heads", "n_heads", "nhead"},
    {"in_chans", "in_channels", "input_channels", "channels"},
    {"num_classes", "out_channels", "n_classes", "classes"},
    {"dims", "spatial_dims", "ndim"},
    {"embed_dim", "dim", "d_model", "hidden_size", "hidden_dim"},
    {"depth", "depths", "num_layers", "n_layers", "layers"},
    {"drop_rate", "dropout", "dropout_rate", "dropout_prob"},
    {"patch_size", "patch", "roi_size", "img_size", "size"},
    {"window", "window_size", "roi_size"},
    {"lr", "learning_rate"},
    {"weight_decay", "wd"},
    {"max_epochs", "epochs"},
    {"root", "path", "folder", "data_dir", "data_root"},
    {"workers", "num_workers"},
)


def did_you_mean(name: str, names: Iterable[str], form: str | None = None) -> str:
    """Return "; did you mean X?" with the name that was probably meant: another library's name for the same, or one
    that is spelt alike. If there is none, a list of the `names`. form="": only the name itself, or nothing."""
    names = sorted(names)
    same = {one for group in SYNONYMS if name in group for one in group}
    near = [one for one in names if one in same]
    lower = {one.lower(): one for one in names}
    near += [lower[one] for one in get_close_matches(name.lower(), lower, 1, 0.6)]
    if form is not None:
        return near[0] if near else form
    return f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(names)}"
