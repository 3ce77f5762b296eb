"""te-emu without a GPU: a stand-in for Transformer Engine whose quantizers are minite_kernels'.

What is tested is ours: padding, the split of fused weights, what is recorded, what is refused.
tests/gpu/te_modules.py runs the real modules.
"""

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from minite_diag.engines import te, te_emu
from minite_diag.engines.te import TeRefExperts
from minite_diag.engines.te_arithmetic import TeArithmetic
from minite_diag.errors import EngineError, EngineUnavailable, UsageError
from minite_kernels.nvfp4.gemm import gemm, prepare
from minite_kernels.nvfp4.quantize import quantize
from minite_kernels.nvfp4.recipe import get_recipe

RECIPE = get_recipe("te-python-cuda")
CALLS: list[tuple[int, ...]] = []


class Quantizer:
    """Returns what TE's reference returns: codes, scales and amax of shape [1]."""

    dtype = "E2M1"

    def __init__(self, role: str) -> None:
        self.role = role

    def quantize(self, tensor: torch.Tensor, **_: Any) -> Any:
        q = quantize(tensor, RECIPE, role=self.role)  # type: ignore[arg-type]
        return SimpleNamespace(
            data=q.codes,
            scale=q.block_scale,
            global_amax_row=q.amax.reshape(1),
            q=q,
            _quantizer=self,
        )

    def qgemm(
        self, qx: Any, qw: Any, m_params: Any, out_dtype: torch.dtype, *_: Any, **results: Any
    ) -> torch.Tensor:
        a, b = results["qresult_x"].q, results["qresult_w"].q
        return gemm(a, prepare(b), out_dtype=out_dtype)


class Linear(nn.Module):
    """A te.Linear: asks its recipe's factory for the quantizers of input and weight."""

    def __init__(self, k: int, n: int, *, bias: bool, params_dtype: Any, device: Any) -> None:
        super().__init__()
        assert not bias
        self.weight = nn.Parameter(torch.zeros(n, k, dtype=params_dtype, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(tuple(x.shape))
        factory = RUNNING[-1].qfactory
        a = factory(SimpleNamespace(tensor_type="input")).quantize(x)
        b = factory(SimpleNamespace(tensor_type="weight")).quantize(self.weight.detach())
        factory(None)
        # As TE's custom_gemm calls it.
        given = (a.data, b.data, None, x.dtype, a.scale, b.scale, None)
        y: torch.Tensor = a._quantizer.qgemm(*given, qresult_x=a, qresult_w=b)
        return y


RUNNING: list[Any] = []


@contextlib.contextmanager
def autocast(*, enabled: bool, recipe: Any) -> Any:
    RUNNING.append(recipe)
    yield
    RUNNING.pop()


@pytest.fixture(autouse=True)
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def factory(role: Any) -> Quantizer:
        kind = getattr(role, "tensor_type", None)
        return Quantizer("weight" if kind == "weight" else "activation")

    modules: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {
            "CustomRecipe": lambda qfactory: SimpleNamespace(qfactory=qfactory)
        },
        "transformer_engine.pytorch": {"Linear": Linear, "autocast": autocast},
        "transformer_engine.pytorch.custom_recipes": {},
        "transformer_engine.pytorch.custom_recipes.reference_nvfp4": {
            "nvfp4_ref_rht_2d_factory": factory,
            "NVFP4TensorRef": SimpleNamespace,
        },
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    CALLS.clear()


def tensors(tokens: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return (
        torch.randn(tokens, k, generator=generator).bfloat16(),
        torch.randn(n, k, generator=generator).bfloat16(),
    )


@pytest.mark.parametrize("tokens", (1, 31, 32, 45))
def test_padding_changes_neither_codes_nor_outputs(tokens: int) -> None:
    x, w = tensors(tokens, 64, 48)
    y, q = te_emu.EmulatedLinear(w, RECIPE, "emu").multiply(x)
    act, weight = quantize(x, RECIPE), quantize(w, RECIPE, role="weight")
    assert torch.equal(q.codes, act.codes)
    assert torch.equal(q.block_scale.view(torch.uint8), act.block_scale.view(torch.uint8))
    for kind in ("amax", "global_encode_scale", "global_decode_scale"):
        assert torch.equal(getattr(q, kind), getattr(act, kind))
    assert torch.equal(y, gemm(act, prepare(weight), out_dtype=torch.bfloat16))
    assert all(rows % te_emu.ROWS == 0 for rows, _ in CALLS)


@pytest.mark.parametrize("name", sorted(te_emu.ALIGNED_RECIPES))
def test_an_aligned_recipe_computes_in_te_modules_what_te_ref_computes(name: str) -> None:
    x, w = tensors(45, 64, 48)
    recipe = get_recipe(name)
    y, q = te_emu.EmulatedLinear(w, recipe, "emu").multiply(x)
    act, weight = quantize(x, recipe), quantize(w, recipe, role="weight")
    for kind in ("codes", "amax", "global_encode_scale", "global_decode_scale"):
        assert torch.equal(getattr(q, kind), getattr(act, kind)), kind
    assert torch.equal(q.block_scale.view(torch.uint8), act.block_scale.view(torch.uint8))
    assert torch.equal(y, gemm(act, prepare(weight), out_dtype=torch.bfloat16))


def test_parts_of_a_fused_weight_share_one_call_and_one_amax() -> None:
    x, w = tensors(5, 64, 96)
    modules = []
    for part in (w[:64], w[64:80], w[80:]):
        module = nn.Linear(64, part.shape[0], bias=False, dtype=torch.bfloat16)
        module.weight.data.copy_(part)
        modules.append(module)
    linears = te_emu.linear_modules(["q", "k", "v"], modules, RECIPE, "emu")
    CALLS.clear()
    given = x[None]
    y = torch.cat([linear(given) for linear in linears], -1)
    assert len(CALLS) == 1
    whole = quantize(w, RECIPE, role="weight")
    assert torch.equal(y[0], gemm(quantize(x, RECIPE), prepare(whole), out_dtype=torch.bfloat16))
    assert torch.equal(linears[1].site.weight_q.codes, whole.codes[64:80])
    assert [name for name, _ in linears[0].named_parameters()] == []
    linears[0](given.clone())
    assert len(CALLS) == 2


def test_experts_are_those_of_te_ref() -> None:
    generator = torch.Generator().manual_seed(0)
    module = nn.Module()
    module.gate_up_proj = nn.Parameter(torch.randn(3, 64, 32, generator=generator).bfloat16())
    module.down_proj = nn.Parameter(torch.randn(3, 32, 32, generator=generator).bfloat16())
    module.act_fn = nn.SiLU()
    parts = ("gate_proj", "up_proj", "down_proj")
    names = frozenset(f"experts.{e}.{part}" for e in range(3) for part in parts)
    arguments = ("experts", module, TeArithmetic(RECIPE, RECIPE), names, torch.bfloat16)
    x = torch.randn(9, 32, generator=generator).bfloat16()
    ids = torch.tensor([[0, 1], [1, 2], [2, 0]] * 3)
    weights = torch.rand(9, 2, generator=generator).bfloat16()
    reference = TeRefExperts(*arguments)
    emulated = te_emu.TeModuleExperts("emu", *arguments)
    assert torch.equal(emulated(x, ids, weights), reference(x, ids, weights))
    assert emulated.linears.keys() == reference.linears.keys() == names
    for name in names:
        ours, theirs = reference.linears[name].weight_q, emulated.linears[name].weight_q
        assert torch.equal(ours.codes, theirs.codes)
        assert torch.equal(ours.global_decode_scale, theirs.global_decode_scale)


def test_what_te_does_not_multiply_is_refused() -> None:
    with pytest.raises(EngineError, match="multiple of 8"):
        te_emu.EmulatedLinear(torch.ones(16, 48, dtype=torch.bfloat16), RECIPE, "emu")
    biased = nn.Linear(64, 16, dtype=torch.bfloat16)
    with pytest.raises(EngineError, match="no bias"):
        te_emu.linear_modules(["q"], [biased], RECIPE, "emu")


@pytest.mark.parametrize(
    ("capability", "impl", "recipe", "expected"),
    (
        (None, "auto", None, ("ref", "te")),
        (8.0, "auto", None, ("ref", "te")),
        (9.0, "auto", None, ("emu", "te-python-cuda")),
        (9.0, "auto", "te", ("ref", "te")),
        (9.0, "ref", None, ("ref", "te")),
        (9.0, "emu", None, ("emu", "te-python-cuda")),
        (10.0, "auto", None, ("native", "te")),
        (10.0, "auto", "pow2", ("ref", "pow2")),
        (10.0, "emu", None, ("emu", "te-python-cuda")),
        (9.0, "native", None, EngineUnavailable),
        (None, "emu", None, EngineUnavailable),
        (9.0, "emu", "te", UsageError),
        (9.0, "emu", "pow2-row-scaled", ("emu", "pow2-row-scaled")),
        (9.0, "auto", "pow2-row-scaled", ("ref", "pow2-row-scaled")),
        (10.0, "native", "te-python", UsageError),
    ),
)
def test_the_implementation_follows_device_and_recipe(
    capability: float | None,
    impl: str,
    recipe: str | None,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(te_emu, "compute_capability", lambda: capability)
    monkeypatch.setattr(te_emu, "is_installed", lambda: True)
    device = torch.device("cuda" if capability else "cpu")
    if isinstance(expected, tuple):
        assert te_emu.choose(impl, recipe, device) == expected
    else:
        with pytest.raises(expected):
            te_emu.choose(impl, recipe, device)


def test_without_te_its_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_emu, "compute_capability", lambda: 9.0)
    monkeypatch.setattr(te_emu, "is_installed", lambda: False)
    assert te_emu.choose("auto", None, torch.device("cuda")) == ("ref", "te")
    with pytest.raises(EngineUnavailable, match="no transformer_engine"):
        te_emu.choose("emu", None, torch.device("cuda"))


@pytest.mark.parametrize(
    ("capability", "label"), ((None, "te-ref"), (9.0, "te-emu"), (10.0, "te"), (8.0, "te-ref"))
)
def test_doctor_names_what_auto_chooses(
    capability: float | None, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(te_emu, "compute_capability", lambda: capability)
    monkeypatch.setattr(te_emu, "is_installed", lambda: True)
    monkeypatch.setattr(te, "_default_device", lambda: "cuda" if capability else "cpu")
    assert te.best_label() == label
