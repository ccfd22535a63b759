"""The guard that the framework puts around every backend: deadline, breaker, frames, trace.

Imports the vocabulary, `kvconnect.backends.url`, `kvconnect.backends.lanes` and the kernels that
quantise; never a store. Begin with `store` (`GuardedBackend`, the order in which a call passes
through the rest), then `calls` and `breaker` (time), `framed_store`, `pieces` and `frames` (what is
stored), `codecs`, `compression` and `encryption`; `labels` and `gauges` serve its metrics.
"""
