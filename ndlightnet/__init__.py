"""LightNet attention for sequences, images, videos and volumes: one network, any number of axes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ndlightnet.version import __version__ as __version__

if TYPE_CHECKING:
    from ndlightnet.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import all names of `ndlightnet.public` when one is used: `ndlightnet --help` needs none, and torch takes
        seconds. Names that are set stay."""
        public = import_module("ndlightnet.public")
        for key in ("__all__", *public.__all__):
            globals().setdefault(key, getattr(public, key))
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module("ndlightnet.public").__all__})
