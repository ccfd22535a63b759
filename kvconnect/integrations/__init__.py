"""Other engines' names: what lets their users, and clients written for them, use kvconnect.

Stands above the engine and may import everything below; nothing imports from here. An engine is
never a dependency: what needs one imports it when it is used. `core` holds what the adapters of
several engines share; begin there. `vllm`, `sglang` and `trtllm` are called by those engines,
`transformers` is a prompt cache for ``generate()``.
`trtllm_shim` lets clients of TensorRT-LLM run on kvconnect's engine.
"""
