"""minite-diag: find, explain and close the execution gap in low-precision RL for LLMs."""

__version__ = "0.1.0"
