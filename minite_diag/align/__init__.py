"""The align stage: climb the ladder of alignments, price it, leave one out.

Every measurement is a whole run of its own under `RUN/align/`, captured and compared like the first.
"""

from minite_diag.align.ladder import ALIGN_JSON, ALIGN_SCHEMA, align

__all__ = ["ALIGN_JSON", "ALIGN_SCHEMA", "align"]
