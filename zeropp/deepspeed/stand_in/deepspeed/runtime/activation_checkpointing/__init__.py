"""Package of DeepSpeed's activation checkpointing."""
