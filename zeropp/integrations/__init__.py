"""Adapters that let trainers of other libraries use zeropp. Each module is for one library and imports that library.

An adapter translates between the library's calls and zeropp's engine or optimizer; it does not move weights itself.
Start with :mod:`zeropp.integrations.lightning`.
"""
