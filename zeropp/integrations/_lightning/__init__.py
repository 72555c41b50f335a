"""The common parts of the strategies for ``lightning`` and for ``pytorch_lightning``.

Nothing here imports either package by its name: :mod:`~zeropp.integrations._lightning.classes` puts the parts onto the
base classes of the one that it is given.
"""
