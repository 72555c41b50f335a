"""Attributes that DeepSpeed's release has removed, but that tests of an older commit read; loaded in every process.

The release's own tests do not read them. Without these attributes, tests that compare checkpoints would fail.
"""

from deepspeed.runtime.engine import DeepSpeedEngine

# Names of layers with sparse gradients, which older tests compare before and after a checkpoint; always empty now.
if not hasattr(DeepSpeedEngine, "sparse_tensor_module_names"):
    DeepSpeedEngine.sparse_tensor_module_names = ()
