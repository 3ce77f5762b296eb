"""The gate: limits on a stored run -> pass, fail, inconclusive or error.

Reads Parquet and numpy only: no torch, no pandas. Invariant: a verdict is given on the confidence
bound of a bootstrap that resamples whole sequences; a run in which something was not measured
never passes.
"""

from minite_diag.gate.judge import GateRequest, check_gate, with_gate
from minite_diag.gate.limits import METRICS, PROFILES, get_profile, parse_limit

__all__ = [
    "METRICS",
    "PROFILES",
    "GateRequest",
    "check_gate",
    "get_profile",
    "parse_limit",
    "with_gate",
]
