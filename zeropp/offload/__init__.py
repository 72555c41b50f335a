"""Shards that have no room on the device: the host's memory and files, staging buffers, and direct I/O.

Knows tensors, bytes and threads; not what the numbers are, nor who steps them. Start with `home`, what a row of numbers
is, and `homes`, which configuration puts what where. `read_ahead` brings rows to the device, `transfer` reads and
writes files in threads, `swap` has the files, and `parked` storages that are off the device between two phases.
"""
