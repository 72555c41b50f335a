"""Version information in the form of DeepSpeed's module of the same name."""

import torch

from zeropp.deepspeed.stand_in_path import VERSION

__all__ = ["git_branch", "git_hash", "torch_info", "version"]

version, git_hash, git_branch = VERSION, "zeropp", "zeropp"
# torch's own versions, because the stand-in has no compiled code that could need other versions.
torch_info = {"version": str(torch.__version__), "cuda_version": str(torch.version.cuda), "hip_version": "0.0"}
