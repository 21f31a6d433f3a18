"""Measurements. Uses kvd; kvd never imports this."""
