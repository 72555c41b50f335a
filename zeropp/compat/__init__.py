"""Old import paths of :mod:`zeropp.deepspeed`, for scripts that have them.

Knows names alone. Start with ``deepspeed/__init__.py``, and find the code in ``zeropp/deepspeed``.
"""
