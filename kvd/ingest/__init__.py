"""Engine streams reach the core: over ZMQ, or from recordings. Gap repair and restart fencing are the core's rules."""
