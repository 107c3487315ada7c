"""This library inside other libraries. Each file here that is named after a library imports it;
`import ndlightnet.integrations` imports none."""
