"""What every engine has to hold, as tests to inherit: `class TestMine(EngineContract): engine = "mine"`.

Needs pytest, which is not a dependency of the tool. Each class captures its engine twice, as learner
and as sampler, in processes of their own, and reads what they wrote. Invariant: nothing here knows
which engine it looks at.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

import pandas as pd
import pytest

from minite_diag.capture.runner import capture
from minite_diag.checkpoints import open_checkpoint
from minite_diag.compare import compare
from minite_diag.engines.base import EVIDENCE
from minite_diag.plan import CaptureSpec, Plan, read_plan
from minite_diag.prepare import CompareRequest, EngineRequest, prepare
from minite_diag.site import matches
from minite_diag.trace.manifest import read_manifests
from minite_diag.trace.store import Trace


class EngineContract:
    """Subclass it, name the engine; `options` are its options, `model` what it loads."""

    engine: ClassVar[str]
    options: ClassVar[dict[str, str]] = {}
    model: ClassVar[str] = "demo-moe"
    quantize: ClassVar[str] = "none"
    dtype: ClassVar[str] = "float32"

    @pytest.fixture(scope="class")
    def run(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A run of the engine against itself: two probes, scored and sampled."""
        folder = tmp_path_factory.mktemp(self.engine)
        request = EngineRequest(self.engine, dict(self.options))
        plan = prepare(
            CompareRequest(
                learner=request,
                samplers=(request,),
                model=self.model,
                num_probes=2,
                quantize=self.quantize,
                dtype=self.dtype,
                sample_tokens=4,
                capture=CaptureSpec(sample_tensors=True),
            ),
            folder,
            lambda _: None,
        )
        for result in capture(plan, folder, lambda *_: None):
            assert result.status == "ok", f"{result.engine_id}: {result.message} ({result.log})"
        compare(folder)
        return folder

    @pytest.fixture(scope="class")
    def traces(self, run: Path) -> list[Trace]:
        """The learner's and the sampler's trace."""
        return [Trace(run / "traces" / spec.id) for spec in read_plan(run).engines]

    def test_it_says_what_runs(self, run: Path) -> None:
        """Label, version, device, dtype; who computed each op."""
        for manifest in read_manifests(run, read_plan(run)).values():
            assert manifest["label"]
            assert manifest["version"]
            assert manifest["device"]
            assert manifest["dtype"] == self.dtype
            assert manifest["evidence"], "say who computed the ops"
            assert {item["status"] for item in manifest["evidence"]} <= set(EVIDENCE)

    def test_every_hook_that_was_promised_fires(self, run: Path) -> None:
        """A hook that never fires is a module that was missed, or a promise too many."""
        for manifest in read_manifests(run, read_plan(run)).values():
            assert manifest["silent_hooks"] == []

    def test_every_linear_is_seen_by_its_checkpoint_name_or_declared_invisible(
        self, run: Path, traces: list[Trace]
    ) -> None:
        """Outputs of all linears, unless `EngineInfo.invisible` has the reason."""
        plan = read_plan(run)
        linears = open_checkpoint(Path(plan.model.path)).linear_names()
        seen = set(pd.read_parquet(run / "comparison.parquet")["fqn"])
        invisible = tuple(read_manifests(run, plan)[traces[0].id]["invisible"])
        missing = [
            fqn
            for fqn in linears
            if fqn not in seen and not matches(fqn, "output", invisible) and ".experts." not in fqn
        ]
        assert missing == []

    def test_it_repeats_itself_bit_for_bit(self, run: Path) -> None:
        """Two processes, the same tokens: equal log-probabilities and equal tensors."""
        rows = pd.read_parquet(run / "comparison.parquet")
        compared = rows[(rows["status"] == "compared") & (rows["mode"] == "score")]
        assert len(compared)
        assert (compared["bitwise_fraction"] == 1.0).all()
        logprobs = pd.read_parquet(run / "logprobs.parquet")
        score = logprobs[logprobs["mode"] == "score"]
        assert len(score)
        assert (score["baseline_logprob"] == score["target_logprob"]).all()

    def test_log_probabilities_are_of_the_tokens_that_were_given(
        self, run: Path, traces: list[Trace]
    ) -> None:
        """One for each token but the first, none above zero, for the plan's own ids."""
        plan = read_plan(run)
        for trace in traces:
            score = trace.tokens[trace.tokens["mode"] == "score"]
            for probe in plan.probes:
                own = score[score["probe"] == probe.id].sort_values("position")
                assert tuple(own["token_id"]) == probe.token_ids
                assert own["logprob"].isna().tolist() == [True] + [False] * (len(own) - 1)
                assert (own["logprob"].dropna() <= 0.0).all()

    def test_it_samples_with_log_probabilities(self, run: Path, traces: list[Trace]) -> None:
        """As many new tokens as asked for, in the vocabulary, each with its log-probability."""
        plan, trace = read_plan(run), traces[1]
        own = trace.tokens[(trace.tokens["mode"] == "sample") & trace.tokens["generated"]]
        assert len(own) == plan.sample_tokens * len(plan.probes)
        assert own["logprob"].notna().all()
        assert own["token_id"].between(0, plan.model.vocab_size - 1).all()

    def test_sampling_and_scoring_agree(self, run: Path) -> None:
        """The sampler's own log-probabilities are those of the same tokens teacher-forced."""
        rows = pd.read_parquet(run / "logprobs.parquet")
        own = rows[(rows["mode"] == "sample") & rows["generated"]]
        difference = (own["baseline_logprob"] - own["target_logprob"]).abs()
        assert len(own)
        assert difference.max() < 1e-3, "decode differs from prefill by more than FP32 rounding"

    def test_an_unknown_option_is_refused(self, tmp_path: Path) -> None:
        """A misspelt option must not be ignored."""
        request = EngineRequest(self.engine, {**self.options, "no_such_option": "1"})
        plan = prepare(
            CompareRequest(
                learner=request,
                samplers=(request,),
                model=self.model,
                num_probes=1,
                quantize=self.quantize,
                dtype=self.dtype,
            ),
            tmp_path,
            lambda _: None,
        )
        (first, *_) = capture(_only(plan, 0), tmp_path, lambda *_: None)
        assert first.status == "error"
        assert "no_such_option" in (first.message or "")


def _only(plan: Plan, index: int) -> Plan:
    return dataclasses.replace(plan, engines=(plan.engines[index],))
