"""Other libraries' names over zeropp, for scripts that nobody wants to rewrite.

Knows what such scripts import and reach into; not how anything is trained, which is all called from ``zeropp``.
Start with ``deepspeed/__init__.py``.
"""
