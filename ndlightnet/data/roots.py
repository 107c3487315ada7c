"""Paths of data: relative roots are looked up in the working folder, then in $NDLIGHTNET_DATA."""

import os
from pathlib import Path

VARIABLE = "NDLIGHTNET_DATA"


def find_root(root: str | Path) -> Path:
    """Return the file or folder that a config's `root` means.

    A relative `root` that does not exist from the working folder is taken from the folder that the
    environment variable NDLIGHTNET_DATA names, if it exists there. In all other cases `root` is
    returned as it is: absolute, found, made later (phantoms and digits), or missing everywhere, so
    that an error names what the config says.
    """
    root, base = Path(root), os.environ.get(VARIABLE)
    if not base or root.is_absolute() or root.exists():
        return root
    there = Path(base).expanduser() / root
    return there if there.exists() else root
