"""The adapters for other engines, so that their users and clients can use kvconnect.

Stands above the engine and may import everything below; nothing imports from here. An engine is
never a dependency: a module that needs an engine imports it on use. `core` holds the parts that
several adapters share; begin there. `vllm`, `sglang` and `trtllm` are called by those engines,
`vllm_tier` by vLLM's offloading connector. `transformers` is a prompt cache for ``generate()``.
`trtllm_shim` lets clients of TensorRT-LLM run on kvconnect's engine.
"""
