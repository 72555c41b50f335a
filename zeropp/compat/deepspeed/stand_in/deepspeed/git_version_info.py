"""What the stand-in says it was built from."""

from zeropp.compat.deepspeed.place import VERSION

__all__ = ["git_branch", "git_hash", "version"]

version, git_hash, git_branch = VERSION, "zeropp", "zeropp"
