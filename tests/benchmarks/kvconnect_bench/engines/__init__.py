"""``kvconnect bench engines``: what connectors cost an engine, and what a restart costs with them.

Begin with `run`; `kvconnect_bench.peers.vllm_connectors` is the process of the engine.
"""
