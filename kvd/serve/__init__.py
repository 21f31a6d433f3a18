"""Queries reach the core."""
