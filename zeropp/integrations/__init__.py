"""Other people's trainers on zeropp: one module for each, which is imported by name and imports that trainer.

Knows how those trainers call; not how weights move, which :mod:`zeropp.deepspeed` and all below it do. Start with
:mod:`zeropp.integrations.lightning`.
"""
