"""Each engine against itself: what its numbers are worth before two engines are compared.

Knows live runs and stored tokens; no tensor. A leg is one equality that ought to hold; together
they are the engine's noise floor. Invariant: a leg that was not run is a row with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from minite_diag.attribute.gap import Key, live_logprobs, paired, stored_logprobs
from minite_diag.attribute.live_runs import BudgetSpent, LiveRuns
from minite_diag.capture.live import Job, Scored, SequenceSpec
from minite_diag.errors import EngineUnavailable, MiniteDiagError

BATCH_SIZES: Final = (2, 4, 8)
CHUNK_TOKENS: Final = 16
DECODE_BATCH: Final = 4
CODES: Final = {
    "observer": "MD501",
    "repeat": "MD502",
    "batch-2": "MD503",
    "batch-4": "MD503",
    "batch-8": "MD503",
    "chunked-prefill": "MD504",
    "prefill-decode": "MD505",
    "batch-decode": "MD503",
    "decode-again": "MD506",
    "production": "MD507",
}
"""Leg -> cause where it is not an equality."""

Logprobs = Mapping[Key, Mapping[int, float]]


def measure_legs(
    runs: LiveRuns,
    tokens: pd.DataFrame,
    score: list[SequenceSpec],
    sampled: list[SequenceSpec],
    seed: int,
) -> list[dict[str, Any]]:
    """One row per leg; `tokens` are the engine's stored ones, `sampled` what it drew with `seed`.

    The session must be fresh: bare jobs run before the engine is hooked.
    """
    return list(_Legs(runs, tokens, score, sampled, seed).rows())


def measure_production(
    runs: LiveRuns, tokens: pd.DataFrame, score: list[SequenceSpec]
) -> dict[str, Any]:
    """The row of the leg that needs an engine of its own: loaded in the settings of a service."""
    legs = _Legs(runs, tokens, score, [], 0)
    return legs.row("production", legs.observer, "in production settings against the captured run")


def leg_row(engine: str, leg: str, note: str, reason: str = "") -> dict[str, Any]:
    """A leg that was not measured."""
    return {
        "engine": engine,
        "leg": leg,
        "status": "skipped",
        "reason": reason,
        "tokens": 0,
        "equal": 0,
        "mean_abs": None,
        "max_abs": None,
        "note": note,
        "code": None,
    }


class _Legs:
    def __init__(
        self,
        runs: LiveRuns,
        tokens: pd.DataFrame,
        score: list[SequenceSpec],
        sampled: list[SequenceSpec],
        seed: int,
    ) -> None:
        self.runs, self.tokens, self.seed = runs, tokens, seed
        self.score, self.sampled = score, sampled
        self.alone: Logprobs = {}
        self.decoded: Scored | None = None
        self.cached = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Run and compare, the cheap legs first."""
        yield self.row("observer", self.observer, "bare run against the captured one")
        yield self.row("repeat", self._repeat, "the same bare run again, in one process")
        if self.sampled:
            yield self.row("prefill-decode", self._decode, "its own samples scored by prefill")
            yield self.row(
                "batch-decode",
                self._batch_decode,
                f"decoded alone and in a batch of {DECODE_BATCH}",
            )
            row = self.row("decode-again", self._decode_again, "")
            yield row | {"note": self._again_note()}
        yield self.row(
            "chunked-prefill", self._chunked, f"prefill in chunks of {CHUNK_TOKENS} tokens"
        )
        for size in BATCH_SIZES:
            yield self.row(
                f"batch-{size}",
                lambda size=size: self._batch(size),  # type: ignore[misc]
                f"alone against a batch of {size}",
            )

    def row(self, leg: str, measure: Any, note: str) -> dict[str, Any]:
        """Measure one leg; what fails or does not fit is a reason."""
        row = leg_row(self.runs.session.spec.id, leg, note)
        try:
            one, other = measure()
        except BudgetSpent as spent:
            return row | {"reason": str(spent)}
        except MiniteDiagError as error:
            return row | {"reason": error.message}
        pairs = paired(one, other).values()
        if not pairs:
            return row | {"reason": "no token that both runs gave a log-probability for"}
        size = np.abs(np.concatenate([x - y for _, x, y in pairs]))
        return row | {
            "status": "measured",
            "tokens": len(size),
            "equal": int((size == 0.0).sum()),
            "mean_abs": float(size.mean()),
            "max_abs": float(size.max()),
            "code": CODES[leg] if size.any() else None,
        }

    def _live(self, name: str, sequences: list[SequenceSpec], **fields: Any) -> Logprobs:
        job = Job(name, tuple(sequences), hooked=False, **fields)
        return live_logprobs(self.runs.run("legs", job).scored)

    def observer(self) -> tuple[Logprobs, Logprobs]:
        """The captured run, and the same tokens without hooks."""
        self.alone = self._live("bare", self.score)
        return stored_logprobs(self.tokens[self.tokens["mode"] == "score"]), self.alone

    def _repeat(self) -> tuple[Logprobs, Logprobs]:
        return self.alone, self._live("bare-again", self.score)

    def _chunked(self) -> tuple[Logprobs, Logprobs]:
        found = self._live("chunked", self.score, action="chunked", size=CHUNK_TOKENS)
        return self.alone, found

    def _batch(self, size: int) -> tuple[Logprobs, Logprobs]:
        # One sequence: the cost of a batch is that of all its members.
        found = self._live(
            f"batch-{size}",
            self.score[:1],
            action="batch",
            size=size,
            neighbours=tuple(neighbours(self.score, size)),
        )
        return self.alone, found

    def _batch_decode(self) -> tuple[Logprobs, Logprobs]:
        """Alone and in a batch, from one seed; up to where the drawn tokens part."""
        first = self.sampled[0]
        tokens = len(first.token_ids) - first.prompt_length
        prompts = [s for s in neighbours(self.score, DECODE_BATCH) if s.probe != first.probe]
        found = [
            self.runs.run(
                "legs",
                Job(
                    f"decode-{action}",
                    (first,),
                    action=action,
                    hooked=False,
                    size=DECODE_BATCH,
                    tokens=tokens,
                    seed=self.seed,
                    neighbours=tuple(prompts),
                ),
            ).scored[0]
            for action in ("sample", "batch-sample")
        ]
        self.decoded = found[0]
        return _up_to_where_they_part(*found)

    def _decode_again(self) -> tuple[Logprobs, Logprobs]:
        """The first decoding of this process against the same request in the used engine."""
        if self.decoded is None:
            raise EngineUnavailable("the request was not decoded before")
        first = self.sampled[0]
        tokens = len(first.token_ids) - first.prompt_length
        job = Job(
            "decode-again", (first,), action="sample", hooked=False, tokens=tokens, seed=self.seed
        )
        again = self.runs.run("legs", job).scored[0]
        self.cached = again.cached_tokens
        return _up_to_where_they_part(self.decoded, again)

    def _again_note(self) -> str:
        note = "its first request again, after the others"
        if self.cached:
            return f"{note}: {self.cached} tokens of the prompt from the prefix cache"
        return f"{note}: caches hold other requests"

    def _decode(self) -> tuple[Logprobs, Logprobs]:
        own = self.tokens[
            (self.tokens["source"] == self.runs.session.spec.id)
            & (self.tokens["phase"] == "decode")
        ]
        return stored_logprobs(own), self._live("rescored", self.sampled)


def neighbours(sequences: list[SequenceSpec], size: int) -> list[SequenceSpec]:
    """At least `size` sequences to fill a batch: the given ones, then prefixes of them."""
    found = list(sequences)
    cut = 2
    while len(found) <= size:
        for sequence in sequences:
            ids = sequence.token_ids[: max(2, len(sequence.token_ids) * (cut - 1) // cut)]
            probe = f"{sequence.probe}, first {len(ids)}"
            prompt = min(sequence.prompt_length, len(ids))
            found.append(SequenceSpec(sequence.mode, sequence.source, probe, ids, prompt))
        cut += 1
    return found


def _up_to_where_they_part(one: Scored, other: Scored) -> tuple[Logprobs, Logprobs]:
    same = common_length(one.token_ids, other.token_ids)
    found = [
        {key: {i: v for i, v in values.items() if i <= same} for key, values in logprobs.items()}
        for logprobs in (live_logprobs((one,)), live_logprobs((other,)))
    ]
    return found[0], found[1]


def common_length(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The last position up to which two token lists are equal."""
    parts = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return (min(len(one), len(other)) if parts is None else parts) - 1


def worst_legs(legs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The worst leg of each engine, by mean absolute difference."""
    floor: dict[str, dict[str, Any]] = {}
    for row in legs:
        if row["status"] != "measured":
            continue
        worst = floor.setdefault(row["engine"], {"mean_abs": 0.0, "max_abs": 0.0, "leg": None})
        worst["max_abs"] = max(worst["max_abs"], row["max_abs"])
        if row["mean_abs"] > worst["mean_abs"]:
            worst["mean_abs"], worst["leg"] = row["mean_abs"], row["leg"]
    return floor
