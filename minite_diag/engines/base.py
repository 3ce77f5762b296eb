"""What every engine does, and how it describes itself.

Knows torch as a type only and no engine library. An engine captures raw native tensors and says
in its `Layout` how they map to checkpoint names; nothing here compares anything.

To add an engine: subclass Engine, name it "module:Class" under the entry-point group
`minite_diag.engines`, and let its tests subclass `minite_diag.testing.EngineContract`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final

from minite_diag.errors import EngineUnavailable
from minite_diag.plan import EngineSpec, Plan

if TYPE_CHECKING:
    from minite_diag.capture.recorder import Recorder

EVIDENCE: Final = ("native", "emulated", "modelled", "replaced")
"""native: the engine's own kernel. emulated: the engine's own code path that imitates hardware.
modelled: our bit-exact model of an engine that isn't here. replaced: our op inside the engine."""


@dataclass(frozen=True)
class Evidence:
    """Who computed one op: `status` is one of EVIDENCE, `impl` the function that ran."""

    op: str
    status: str
    impl: str
    note: str = ""
    instead_of: str = ""
    """Of a replaced op: what the engine runs by itself, and its note."""


@dataclass(frozen=True)
class Part:
    """One checkpoint module inside a native (fused) module.

    `start:stop` are its rows among the output features (0:0 means all of them), once in every
    `period` rows where that is not 0; `expert` is its index in a leading expert dimension.
    """

    fqn: str
    start: int = 0
    stop: int = 0
    expert: int | None = None
    period: int = 0


@dataclass(frozen=True)
class Layout:
    """Native module name -> its parts. A native name that is absent stands for itself."""

    parts: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    block_scale_layout: str = "linear"


@dataclass(frozen=True)
class EngineInfo:
    """What really ran. `label` distinguishes variants (te-ref, te-emu, te)."""

    label: str
    version: str
    device: str
    dtype: str
    layout: Layout
    evidence: tuple[Evidence, ...]
    invisible: dict[str, str] = field(default_factory=dict)
    """Site glob -> why this engine can't show it (a fused kernel, for example)."""
    settings: dict[str, str] = field(default_factory=dict)
    """Engine settings that change bits, read back from the running engine."""


@dataclass(frozen=True)
class Diagnosis:
    """What an engine would be here, without a model: for `minite-diag doctor`.

    `kernels` are what would compute NVFP4; `problems` are (what is wrong, the command that
    corrects it).
    """

    label: str
    version: str
    device: str
    kernels: tuple[Evidence, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class TokenSequence:
    """Tokens to score, or a prompt to continue. `source` is the engine that generated them."""

    mode: str
    source: str
    probe: str
    token_ids: tuple[int, ...]
    prompt_length: int


@dataclass(frozen=True)
class ScoredTokens:
    """Per position i of the sequence: log p(token i | tokens < i); None at position 0.

    `top_ids[i]`, `top_logprobs[i]` are the k most probable tokens at that position (empty where
    the engine doesn't give them); `phases[i]` is prefill or decode.
    """

    sequence: TokenSequence
    logprobs: tuple[float | None, ...]
    phases: tuple[str, ...]
    top_ids: tuple[tuple[int, ...], ...] = ()
    top_logprobs: tuple[tuple[float, ...], ...] = ()
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were in the engine's prefix cache."""


class Engine(ABC):
    """One loaded model in its own process."""

    name: ClassVar[str]
    production_options: ClassVar[dict[str, str]] = {}
    """Options that give the settings of a service, where a capture needs others (no compilation,
    no graphs). An engine loaded with them can't be observed."""
    patched: Mapping[str, Sequence[str]] = MappingProxyType({})
    """Op -> names of what the alignments patched, once the engine is loaded."""

    @classmethod
    def diagnose(cls) -> Diagnosis:
        """Import the engine's library and say what would run; raises EngineUnavailable."""
        return Diagnosis(cls.name, "", "")

    @classmethod
    def ranks(cls, options: dict[str, str]) -> int:
        """Processes that run the engine with these options, started by torchrun; mostly 1.

        Each makes the same calls. Those of rank 0 write the trace.
        """
        return 1

    @abstractmethod
    def load(self, spec: EngineSpec, plan: Plan) -> EngineInfo:
        """Load `spec.checkpoint` and say what will run.

        Raises EngineUnavailable if the library or a kernel is missing, EngineError if it fails.
        """

    @abstractmethod
    def observe(self, recorder: Recorder) -> None:
        """Hook every linear, expert, norm, router, attention and lm_head to `recorder`.

        Writes the static tensors at once. A module that should be seen and can't be is in
        `EngineInfo.invisible`; a hook that never fires is found by the recorder.
        """

    @abstractmethod
    def score(self, sequence: TokenSequence) -> ScoredTokens:
        """Teacher-forced log-probabilities of a sequence, computed alone (batch of one)."""

    @abstractmethod
    def sample(self, sequence: TokenSequence, num_tokens: int, seed: int) -> ScoredTokens:
        """Continue `token_ids[:prompt_length]` by `num_tokens` at temperature 1, no truncation.

        Returns the whole sequence (prompt + generated) with the sampler's own log-probabilities;
        prompt positions may be None.
        """

    def score_batch(self, sequences: Sequence[TokenSequence]) -> list[ScoredTokens]:
        """As `score`, all sequences in one batch; raises EngineUnavailable if there is no batch."""
        raise EngineUnavailable(f"{self.name} scores one sequence at a time only")

    def sample_batch(
        self, sequences: Sequence[TokenSequence], num_tokens: int, seed: int
    ) -> list[ScoredTokens]:
        """As `sample`, all sequences in one batch; raises EngineUnavailable if there is none."""
        raise EngineUnavailable(f"{self.name} samples one sequence at a time only")

    def score_chunked(self, sequence: TokenSequence, chunk_tokens: int) -> ScoredTokens:
        """As `score`, the prefill cut into chunks; raises EngineUnavailable if it can't be."""
        raise EngineUnavailable(f"{self.name} prefills a sequence as a whole only")

    def close(self) -> None:  # noqa: B027
        """Free the model."""
