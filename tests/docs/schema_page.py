"""docs/schema.md, made from trace/schema.py: `python tests/docs/schema_page.py` writes it."""

from pathlib import Path

import pyarrow as pa

from minite_diag.trace.schema import SCHEMA_VERSION, TABLES

FILE = Path(__file__).parents[2] / "docs" / "schema.md"
WHERE = {
    "tokens": "`traces/ENGINE/tokens.parquet`: every token of every sequence, as one engine saw it.",
    "calls": "`traces/ENGINE/calls.parquet`: which token each row of each forward pass is.",
    "tensors": "`traces/ENGINE/tensors/index-*.parquet`: where each captured tensor lies.",
    "comparison": "`comparison.parquet`: one row for each site, sequence and pair; a skip is a row.",
    "scales": "`scales.parquet`: how often each block scale occurs on either side, by layer.",
    "logprobs": "`logprobs.parquet`: both sides' log-probability of each token.",
    "attribution": "`attribution.parquet`: findings and analyses, one row each.",
}
INTRODUCTION = (
    f"Schema version {SCHEMA_VERSION}. Each file carries `schema_version` and `table` in its "
    "metadata, and each column its description; another version is refused. Beside the tables a "
    "run holds `plan.json`, `request.json`, `summary.json`, `attribution.json` and "
    "`traces/ENGINE/manifest.json`."
)


def page() -> str:
    """The page as Markdown."""
    lines = [
        "# Parquet schema",
        "",
        INTRODUCTION,
        "",
        "```python",
        "import pandas as pd",
        "",
        'rows = pd.read_parquet("runs/demo/comparison.parquet")',
        'print(rows[rows.status == "compared"].groupby("kind").bitwise_fraction.mean())',
        "```",
    ]
    for name, schema in TABLES.items():
        lines += ["", f"## {name}", "", WHERE[name], "", *_table(schema)]
    return "\n".join(lines) + "\n"


def _table(schema: pa.Schema) -> list[str]:
    rows = ["| column | type | |", "|---|---|---|"]
    for field in schema:
        doc = (field.metadata or {}).get(b"doc", b"").decode().replace("|", "\\|")
        rows.append(f"| `{field.name}` | {field.type} | {doc} |")
    return rows


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
