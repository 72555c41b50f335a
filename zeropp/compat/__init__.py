"""Older import paths of :mod:`zeropp.deepspeed`, kept for scripts that use them.

This package only re-exports names. Start with ``deepspeed/__init__.py``. The code is in ``zeropp/deepspeed``.
"""
