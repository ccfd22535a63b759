"""Measures what connectors cost an engine, and a restart with them: ``kvconnect bench engines``.

Begin with `run`; `kvconnect_bench.peers.vllm_connectors` is the process of the engine.
"""
