"""Shards that have no room on the device: the host's memory and files, staging buffers, and direct I/O.

Knows tensors, bytes and threads; not what the numbers are, nor who steps them. Start with `storage_tiers`, for
the tensors that lie in a tier, and `tier_choice`, for the tier that each of them is given. `read_ahead`
brings tensors to the device, `transfer` reads and writes files in threads, `swap` has the files, and `parked` has
storages that are off the device between two phases.
"""
