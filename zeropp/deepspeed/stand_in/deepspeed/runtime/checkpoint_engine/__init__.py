"""Package of DeepSpeed's classes that write checkpoint files."""
