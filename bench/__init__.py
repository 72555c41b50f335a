"""Benchmarks: a package for each suite, run by ``python -m bench.<name>`` in the root of the repository."""
