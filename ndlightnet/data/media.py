"""Opening videos and sounds with PyAV."""

from typing import Any

SURROGATES = 19  # from this version on PyAV reads any title, and takes no argument for it


def open_media(source: Any) -> Any:
    """Return PyAV's container of a file's path or of an open stream, for reading. Titles may have
    bytes that are not UTF-8."""
    import av

    older = int(av.__version__.split(".")[0]) < SURROGATES
    options: dict[str, Any] = {"metadata_errors": "replace"} if older else {}
    return av.open(source, **options)
