"""Translation of training scripts into scripts for Sirtaki: `sirtaki translate`.

Needs libcst (`sirtaki[translate]`).
"""

from .translation import Translation, translate

__all__ = ["Translation", "translate"]
