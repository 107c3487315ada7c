"""Videos with PyAV: opening any, writing H.264."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SURROGATES = 19  # from this version on PyAV reads any title, and takes no argument for it


def open_media(source: Any) -> Any:
    """Return PyAV's container of a file's path or of an open stream, for reading. Titles may have
    bytes that are not UTF-8."""
    import av

    older = int(av.__version__.split(".")[0]) < SURROGATES
    options: dict[str, Any] = {"metadata_errors": "replace"} if older else {}
    return av.open(source, **options)


def write_video(path: Path, pictures: Iterable[NDArray[np.uint8]], fps: int, keys: int = 1) -> None:
    """Write pictures (height, width, 3) of RGB, of even sides, as an H.264 file in which every
    `keys`-th frame is a key frame."""
    import av

    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=fps)
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        # One quantiser for all frames: rate control would depend on the frames that come next.
        stream.options = {"g": str(keys), "qp": "16", "preset": "veryfast"}
        for number, picture in enumerate(pictures):
            if number == 0:
                stream.height, stream.width = picture.shape[:2]
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode())
