"""The common code of the strategies for ``lightning`` and for ``pytorch_lightning``.

No module here imports either package by name. :mod:`~zeropp.integrations._lightning.classes` combines the code with the
base classes of one of the packages.
"""
