"""The guard that the framework puts around every backend: deadline, breaker, frames, trace.

Imports the vocabulary, `kvconnect.backends.url`, `kvconnect.backends.lanes` and the kernels that
quantise; never a store. Begin with `store` (`GuardedBackend`, which a call enters first), then
`calls` and `breaker` (time), `framed_store`, `pieces` and `frames` (stored bytes), `codecs` and
`encryption`; `labels` and `gauges` serve its metrics.
"""
