"""A simulated engine: what vLLM and SGLang do to a KV cache and say about it, without a model.

``python -m bench.engine vllm …`` or ``… sglang …`` is a process with the engine's HTTP interface and event streams. The
parts below it are synchronous and without I/O, so that tests drive the same cache by hand.
"""
