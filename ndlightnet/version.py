"""The version, in a module that others can import without the package's networks."""

__version__ = "0.1.0"
