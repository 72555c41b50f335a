"""``ZeroOptimizer``, the class that users create: it steps this rank's slices with a torch optimizer.

This package uses the engine and torch's optimizers. It reads which hops and codecs a path has, but runs none of them.
Start with `wrapper`, then read `sharded_params`. `step_sync` holds the step sync, by which all ranks agree on a step.
"""
