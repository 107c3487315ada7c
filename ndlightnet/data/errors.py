"""The one error of this room."""


class DataError(ValueError):
    """A file or folder that cannot be used. The message is one line: the path, then what is
    wrong."""
