"""Names of files that DeepSpeed's launcher reads. zeropp has no launcher: use torchrun."""

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME"]

# Accelerate's launcher writes variables for other nodes into it, which only the deepspeed command would read.
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
