"""Shards that are kept off the device, in host memory or in files: storage tiers, staging buffers and direct I/O.

This package works with tensors, bytes and threads. It has no knowledge of the optimizer or of collectives. Start with
`storage_tiers`, which defines tensors stored in a tier, and `tier_choice`, which chooses the tier of each kind of
numbers. `read_ahead` brings tensors to the device, `transfer` reads and writes files in threads, `swap` manages swap
files, and `parked` moves whole storages off the device between two phases.
"""
