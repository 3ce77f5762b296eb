"""One site of a run as a folder that anyone can run: its operands and a script."""

from minite_diag.repro.bundle import Bundle, write_bundle

__all__ = ["Bundle", "write_bundle"]
