"""Benchmark of saving: zeropp compared with the raw disk, torch.distributed.checkpoint of FSDP2, and torch.save."""
