"""What saving costs beside the disk itself, beside torch.distributed.checkpoint with FSDP2, and beside torch.save."""
