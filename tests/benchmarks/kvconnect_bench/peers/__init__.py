"""Others that do the same work, measured beside kvconnect: vLLM, SGLang, LMCache and boto3.

`vllm`, `sglang` and `lmcache` run in interpreters where kvconnect is not installed: they import
NumPy, the standard library, their engine, and `kvconnect_bench.blocks.worker` and `traffic`.
``python -m kvconnect_bench.peers.s3`` is the comparison with boto3: begin there.
"""
