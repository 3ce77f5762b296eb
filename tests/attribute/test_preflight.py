"""Semantic differences are found by fitting, with the fitted value; rounding gives no hit."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from minite_diag.attribute.preflight import preflight
from minite_diag.canonical.names import SequenceKey

TOKENS, VOCAB = 60, 80


class Learner:
    """The part of a Side that preflight reads: logits by sequence."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def read(self, key: SequenceKey, site: Any) -> Any:
        assert site.fqn == "lm_head"
        found = self.logits

        class Site:
            tensor = found
            positions = np.arange(len(found))

        return Site() if key == ("score", "", "p") else None


@pytest.fixture
def case() -> tuple[torch.Tensor, torch.Tensor, Learner]:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, VOCAB, generator=g) * 3
    probabilities = logits[:-1].softmax(-1)
    tokens = torch.multinomial(probabilities, 1, generator=g)[:, 0]
    return logits, tokens, Learner(logits)


def rows(learner: torch.Tensor, sampler: torch.Tensor, tokens: torch.Tensor) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "mode": "score",
            "source": "",
            "probe": "p",
            "position": np.arange(1, TOKENS),
            "token_id": tokens.numpy(),
            "baseline_logprob": learner.double().numpy(),
            "target_logprob": sampler.double().numpy(),
        }
    )


def chosen(logprobs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logprobs[:-1].gather(1, tokens[:, None])[:, 0]


def renormalized(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> torch.Tensor:
    full = logits.log_softmax(-1)
    mass = full.sort(-1, descending=True).values[:, :k].logsumexp(-1)
    return chosen(full - mass[:, None], tokens)


@pytest.mark.parametrize(
    ("name", "code", "value"),
    [
        ("temperature", "MD401", 0.7),
        ("shift", "MD402", 1.0),
        ("divided", "MD403", 0.7),
        ("top_k", "MD404", 10.0),
        ("logits", "MD405", None),
    ],
)
def test_each_is_named_with_its_value(case: Any, name: str, code: str, value: float) -> None:
    logits, tokens, learner = case
    base = chosen(logits.log_softmax(-1), tokens)
    noise = 0.01 * torch.randn(len(base), generator=torch.Generator().manual_seed(1))
    sampler = {
        "temperature": chosen((logits / 0.7).log_softmax(-1), tokens),
        "shift": torch.roll(base, 1),
        "divided": base / 0.7,
        "top_k": renormalized(logits, tokens, 10),
        "logits": chosen(logits, tokens),
    }[name]
    if name != "logits":
        sampler = (sampler + noise).clamp(max=0.0)
    hits = preflight(rows(base, sampler, tokens), learner, "s")  # type: ignore[arg-type]
    assert hits[0].code == code, hits
    assert hits[0].closed > 0.7
    if value is not None:
        assert hits[0].value == pytest.approx(value, rel=0.05)


@pytest.mark.parametrize("size", [0.0, 1e-4, 0.05, 0.3])
def test_rounding_is_no_hit(case: Any, size: float) -> None:
    logits, tokens, learner = case
    base = chosen(logits.log_softmax(-1), tokens)
    noise = size * torch.randn(len(base), generator=torch.Generator().manual_seed(2))
    sampler = (base + noise).clamp(max=0.0)
    assert preflight(rows(base, sampler, tokens), learner, "s") == []  # type: ignore[arg-type]
