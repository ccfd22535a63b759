"""What the framework puts around every backend, yours too: deadline, breaker, frames, trace.

Imports the vocabulary, `kvconnect.backends.url`, `kvconnect.backends.lanes` and the kernels that
quantise; never a store. Begin with `store` (`GuardedBackend`, the order in which a call passes
through the rest), then `calls`, `framed_store`, `frames`.
"""
