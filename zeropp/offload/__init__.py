"""Where shards are that have no room on the device: the host's memory and files, staging buffers, and direct I/O.

Knows tensors, bytes and threads; not what the numbers are, nor who steps them. Start with ``home.py``, what a row of
numbers is, and ``homes.py``, which configuration puts what where.
"""
