"""The command ``python -m deepspeed``. It prints that zeropp has no launcher and names torchrun instead."""

import sys

from .launcher.runner import main

sys.exit(main())
