"""The first divergence per probe and token, with what was equal before it."""

import pandas as pd

from minite_diag.attribute.first_divergence import first_divergence


def row(probe, order, fqn, kind, equal, first_row=None, status="compared"):
    return {
        "mode": "score",
        "probe": probe,
        "order": order,
        "fqn": fqn,
        "kind": kind,
        "layer_index": 0,
        "status": status,
        "bitwise_fraction": 1.0 if equal else 0.5,
        "rel_l2": 0.0 if equal else 0.1,
        "first_row": first_row,
    }


def test_each_probe_has_its_own_first_site_and_token() -> None:
    rows = pd.DataFrame(
        [
            row("a", 0, "norm", "output", True),
            row("a", 1, "q_proj", "input", True),
            row("a", 2, "q_proj", "act_block_scale", True),
            row("a", 3, "q_proj", "act_codes", False, 7),
            row("a", 4, "q_proj", "output", False, 7),
            row("b", 0, "norm", "output", True),
            row("b", 1, "q_proj", "input", True),
            row("b", 2, "q_proj", "act_block_scale", True),
            row("b", 3, "q_proj", "act_codes", True),
            row("b", 4, "q_proj", "output", True),
            row("b", 5, "o_proj", "output", False, 3),
            row("c", 0, "norm", "output", True),
        ]
    )
    found = first_divergence(rows)
    assert found is not None
    assert (found["site"], found["kind"], found["probe"]) == ("q_proj", "act_codes", "a")
    assert (found["position"], found["probes"]) == (7, 1)
    assert found["input_equal"] is True
    assert found["scales_equal"] is True
    assert found["codes_equal"] is False
    assert found["weights_equal"] is None
    assert [(p["probe"], p["site"], p["position"]) for p in found["by_probe"]] == [
        ("a", "q_proj", 7),
        ("b", "o_proj", 3),
    ]


def test_nothing_differs() -> None:
    assert first_divergence(pd.DataFrame([row("a", 0, "norm", "output", True)])) is None
