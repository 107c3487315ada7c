"""LightNet attention for sequences, images, videos and volumes: one network, any number of axes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ndlightnet.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import all names of `ndlightnet.public` when one is used: `ndlightnet --help` needs none, and torch takes
        seconds."""
        public = import_module("ndlightnet.public")
        globals().update({key: getattr(public, key) for key in ("__all__", *public.__all__)})
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]
