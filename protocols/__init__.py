"""What is said on every wire: values in, values out; no sockets, no clock, no files.

``events`` are engine-neutral; ``engine``, ``trtllm``, ``dynamo`` and ``lmcache`` read what each system sends; ``plan``
and ``query`` are kvd's own messages; ``keys`` and ``media`` turn tokens into block keys, the same for both sides.
"""
