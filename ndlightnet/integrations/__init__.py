"""Other people's networks with the attention of this library. Each file here that is named after a
library imports it; `import ndlightnet.integrations` imports none."""

from ndlightnet.integrations.replace import Report, replace_attention

__all__ = ["Report", "replace_attention"]
