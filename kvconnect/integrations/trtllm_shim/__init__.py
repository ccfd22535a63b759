"""A shim that runs clients written for TensorRT-LLM on kvconnect's engine, unmodified.

Call ``install()`` once, before their imports. Then imports of ``tensorrt_llm``, and of those of its
modules that connectors and their scripts use, return kvconnect's classes. They have TensorRT-LLM's
names, arguments and results: of 1.2 to 1.4, and of its main branch as far as the engine has the
feature. Begin with `modules`, the table of names.
"""

from kvconnect.integrations.trtllm_shim.modules import install

__all__ = ["install"]
