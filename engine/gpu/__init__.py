"""Kernels, attention backends and decode graphs for a GPU, behind the interfaces of `engine`."""
