"""``python -m deepspeed``: the launcher, which zeropp has not."""

import sys

from .launcher.runner import main

sys.exit(main())
