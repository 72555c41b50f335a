"""Benchmarks: one package per suite, started with ``python -m bench.<name>`` in the root of the repository."""
