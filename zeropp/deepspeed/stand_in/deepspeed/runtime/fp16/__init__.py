"""Package of DeepSpeed's float16 optimizers."""
