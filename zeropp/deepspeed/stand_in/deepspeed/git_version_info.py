"""What the stand-in says it was built from."""

import torch

from zeropp.deepspeed.stand_in_path import VERSION

__all__ = ["git_branch", "git_hash", "torch_info", "version"]

version, git_hash, git_branch = VERSION, "zeropp", "zeropp"
# Nothing is compiled, so whatever torch there is will do.
torch_info = {"version": str(torch.__version__), "cuda_version": str(torch.version.cuda), "hip_version": "0.0"}
