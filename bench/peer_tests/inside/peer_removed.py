"""Loaded before any test, in every process: what tests of an older commit ask for and the release has removed.

The release's own tests do not ask for it; without it what they check of checkpoints would not be counted at all.
"""

from deepspeed.runtime.engine import DeepSpeedEngine

# Names of layers with sparse gradients, which tests compare before and after a checkpoint: there are none any more.
if not hasattr(DeepSpeedEngine, "sparse_tensor_module_names"):
    DeepSpeedEngine.sparse_tensor_module_names = ()
