"""How DeepSpeed writes its files."""
