"""``python -m mlx_moe`` is ``mlx-moe``."""

import sys

from mlx_moe.cli import main

sys.exit(main())
