"""Clients written for TensorRT-LLM run on kvconnect's engine, unmodified.

``install()`` once, before their imports: then ``tensorrt_llm``, and those of its modules that
connectors and their scripts import, are answered with kvconnect's classes, under TensorRT-LLM's
names and with its arguments and results: of 1.2 to 1.4, and of its main branch as far as the engine
has the like. Begin with `modules`, the table of names.
"""

from kvconnect.integrations.trtllm_shim.modules import install

__all__ = ["install"]
