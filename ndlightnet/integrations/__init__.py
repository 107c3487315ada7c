"""This library inside other libraries, and its attention in their networks. Each file here that is
named after a library imports it; `import ndlightnet.integrations` imports none."""

from ndlightnet.integrations.replace import Report, replace_attention

__all__ = ["Report", "replace_attention"]
