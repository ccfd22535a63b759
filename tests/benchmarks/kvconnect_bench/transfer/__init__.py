"""Measures reads from a peer's memory against floors: ``kvconnect bench transfer``.

Imports the vocabulary, `kvconnect.transfer`, the engine, and other benchmarks' processes and
figures. Begin with `run`; then `pulls` (transports against floors) and `handover` (prefill to
decode). `pull_party` and `engine_party` are what runs in the processes, `floors` the floors that
they measure, `link` a network of a known rate between two of them.
"""
