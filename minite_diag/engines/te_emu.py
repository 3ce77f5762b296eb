"""Real Transformer Engine modules behind engine `te`: with its shipped NVFP4 reference, or native.

`te-emu` is a `te.Linear` for each linear that Transformer Engine would fuse and for each expert,
under a CustomRecipe whose quantizers are those of TE's wheel (compute capability 8.9 and up), or
minite_kernels' where an alignment asks for a recipe that the wheel does not have; the native recipe
needs 10 and up, and no such device has run it here. Imports transformer_engine inside
functions only. Invariant: the codes and scales that are recorded are what the module's quantizers
returned in the call whose output goes on.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from minite_diag.engines.te import QuantizedSite, TeRefExperts
from minite_diag.errors import EngineError, EngineUnavailable, UsageError
from minite_kernels.nvfp4.gemm import gemm, prepare
from minite_kernels.nvfp4.quantize import global_scale, quantize
from minite_kernels.nvfp4.recipe import Recipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

EMULATED_RECIPES: Final = frozenset({"te-python-cuda"})
"""Recipes that the reference quantizers of TE's wheel compute, run on CUDA."""

ALIGNED_RECIPES: Final = frozenset({"te-1d", "te-row-scaled", "pow2", "pow2-row-scaled"})
"""Recipes of the alignments: TE's modules call quantizers and a GEMM of minite_kernels, which a
CustomRecipe may bring. Never chosen by `auto`; the evidence says `replaced`."""

NATIVE_OPTIONS: Final[dict[str, dict[str, bool]]] = {
    "te": {},
    "te-1d": {
        "disable_2d_quantization": True,
        "disable_rht": True,
        "disable_stochastic_rounding": True,
    },
    "te-row-scaled": {
        "disable_2d_quantization": True,
        "disable_rht": True,
        "row_scaled_activation": True,
    },
}
"""Recipe -> arguments of TE's NVFP4BlockScaling."""

ROWS: Final = 32
"""Tokens are padded with zero rows to a multiple of this; neither amax nor other rows see them."""


def compute_capability() -> float | None:
    """Of the current CUDA device, such as 9.0; None without one."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return major + minor / 10


def is_installed() -> bool:
    """Whether Transformer Engine is there to be imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def choose(impl: str, recipe: str | None, device: torch.device) -> tuple[str, str]:
    """(ref | emu | native, recipe) for the option `impl`, auto included.

    `recipe` None means TE's default: `te`, or `te-python-cuda` where the wheel's reference runs.
    Raises EngineUnavailable for what can't run here, UsageError for a recipe it doesn't have.
    """
    capability = compute_capability() if device.type == "cuda" else None
    installed = is_installed()
    if impl == "auto":
        native = installed and capability is not None and capability >= 10
        emulated = installed and capability is not None and 8.9 <= capability < 10
        if native and (recipe or "te") in NATIVE_OPTIONS:
            impl = "native"
        elif emulated and (recipe or "te-python-cuda") in EMULATED_RECIPES:
            impl = "emu"
        else:
            impl = "ref"
    if impl == "ref":
        return impl, recipe or "te"
    least = 10.0 if impl == "native" else 8.9
    if not installed or capability is None or capability < least:
        raise EngineUnavailable(
            f"te: impl={impl} needs transformer_engine and compute capability {least:g}, here are "
            f"{'' if installed else 'no '}transformer_engine and {capability or 'no GPU'}",
            "leave impl out: the label says which one runs",
        )
    known = frozenset(NATIVE_OPTIONS) if impl == "native" else EMULATED_RECIPES | ALIGNED_RECIPES
    recipe = recipe or ("te" if impl == "native" else "te-python-cuda")
    if recipe not in known:
        raise UsageError(
            f"te: impl={impl} has no recipe {recipe!r}",
            f"one of: {', '.join(sorted(known))}, or impl=ref",
        )
    return impl, recipe


def choose_for(
    impl: str, recipes: tuple[str | None, str | None], device: torch.device, *, static: bool
) -> tuple[str, tuple[str, str]]:
    """As `choose`, for the recipes of dense linears and of experts: one `impl` runs both.

    `static` activation scales are not in Transformer Engine's NVFP4: te-ref alone has them.
    """
    if static and impl not in ("auto", "ref"):
        raise UsageError(
            f"te: impl={impl} takes the amax of each call, it has no static activation scales",
            "leave impl out, or the alignment 'static-scale'",
        )
    chosen = "ref" if static else impl
    (first, linears), (second, experts) = (choose(chosen, recipe, device) for recipe in recipes)
    if first == second:
        return first, (linears, experts)
    return choose_for("ref", recipes, device, static=static)


def version() -> str:
    """The version of Transformer Engine that is installed."""
    return importlib.metadata.version("transformer_engine")


@dataclass
class Seen:
    """What a module's quantizers returned last: the weight and the input, as TE's tensors."""

    weight: Any = None
    input: Any = None


class EmulatedLinear:
    """One `te.Linear` and what its quantizers returned; no nn.Module, so that no hook sees it."""

    def __init__(self, weight_NK: torch.Tensor, recipe: Recipe, impl: str) -> None:
        te = importlib.import_module("transformer_engine.pytorch")
        self.recipe, self.impl = recipe, impl
        rows, columns = weight_NK.shape
        if columns % 32 or rows % 8:
            raise EngineError(
                f"te: Transformer Engine multiplies NVFP4 weights [N, K] with N a multiple of 8 "
                f"and K of 32, this one is [{rows}, {columns}]",
                "leave that linear out with --quantize, or impl=ref",
            )
        self.seen = Seen()
        self.module = te.Linear(
            columns, rows, bias=False, params_dtype=weight_NK.dtype, device=weight_NK.device
        )
        with torch.no_grad():
            self.module.weight.copy_(weight_NK)
        self.autocast = te.autocast
        self.te_recipe = _te_recipe(recipe, impl, self.seen)
        self.multiply(weight_NK.new_zeros(ROWS, columns))
        self.weight_q = self._tensor(self.seen.weight, rows, "weight")

    def multiply(self, x_TK: torch.Tensor) -> tuple[torch.Tensor, Nvfp4Tensor]:
        """[T, K] -> (y [T, N], the quantized input)."""
        count = x_TK.shape[0]
        padded = nn.functional.pad(x_TK, (0, 0, 0, -count % ROWS))
        with torch.no_grad(), self.autocast(enabled=True, recipe=self.te_recipe):
            y = self.module(padded)[:count]
        if self.impl == "native":
            self._quantize_again(padded)
        return y, self._tensor(self.seen.input, count, "activation")

    def _quantize_again(self, x_TK: torch.Tensor) -> None:
        """Native quantizers return no tensor to look at; round to nearest even is repeatable."""
        for kind, position, tensor in (("input", 0, x_TK), ("weight", 1, self.module.weight)):
            quantizer = self.module.quantizers["scaling_fwd"][position].copy()
            quantizer.set_usage(rowwise=True, columnwise=False)
            quantizer.optimize_for_gemm = False
            setattr(self.seen, kind, quantizer(tensor.detach()))

    def _tensor(self, found: Any, rows: int, role: Any) -> Nvfp4Tensor:
        if hasattr(found, "minite_tensor"):
            ours: Nvfp4Tensor = found.minite_tensor.rows(slice(0, rows))
            return ours
        if self.impl == "native":
            codes, scales = found._rowwise_data, found._rowwise_scale_inv
            amax = found._amax_rowwise
            scales = scales[: codes.shape[0], : codes.shape[1] // 8]
        else:
            codes, scales, amax = found.data, found.scale, found.global_amax_row
        amax = amax.float().reshape(()) if amax.numel() == 1 else amax.float()[:rows]
        codes = codes[:rows].contiguous()
        # TE keeps the amax alone; the scales are what its GEMM derives from it.
        scale = global_scale(self.module.weight.detach(), self.recipe, role=role, amax=amax)
        return Nvfp4Tensor(
            codes=codes,
            block_scale=scales[:rows].contiguous().view(torch.float8_e4m3fn),
            amax=amax,
            global_encode_scale=scale.encode,
            global_decode_scale=scale.decode,
            shape=(rows, codes.shape[1] * 2),
            recipe=self.recipe,
            role=role,
        )


def _te_recipe(recipe: Recipe, impl: str, seen: Seen) -> Any:
    common = importlib.import_module("transformer_engine.common.recipe")
    if impl == "native":
        return common.NVFP4BlockScaling(**NATIVE_OPTIONS[recipe.name])
    return common.CustomRecipe(qfactory=_factory(seen, recipe))


def _factory(seen: Seen, recipe: Recipe) -> Callable[[Any], Any]:
    """TE's nvfp4_ref_rht_2d_factory, its quantizers writing what they return into `seen`.

    Under a recipe of ALIGNED_RECIPES they compute with minite_kernels.
    """
    reference = importlib.import_module("transformer_engine.pytorch.custom_recipes.reference_nvfp4")
    native = reference.nvfp4_ref_rht_2d_factory

    def factory(role: Any) -> Any:
        quantizer = native(role)
        kind = getattr(role, "tensor_type", None)
        if kind in ("input", "weight"):
            base = type(quantizer)
            if recipe.name in ALIGNED_RECIPES:
                base = _aligned(base, reference.NVFP4TensorRef, recipe, kind)
            quantizer.__class__ = _watched(base)
            quantizer.minite_seen, quantizer.minite_kind = seen, kind
        return quantizer

    return factory


def _watched(base: type) -> type:
    """A subclass of a quantizer that keeps its result; the arithmetic is the base's."""

    class Watched(base):  # type: ignore[misc, valid-type]
        def quantize(self, tensor: torch.Tensor, **kwargs: Any) -> Any:
            found = super().quantize(tensor, **kwargs)
            setattr(self.minite_seen, self.minite_kind, found)
            return found

        def update_quantized(self, src: torch.Tensor, dst: Any, **kwargs: Any) -> Any:
            found = super().update_quantized(src, dst, **kwargs)
            setattr(self.minite_seen, self.minite_kind, found)
            return found

    return Watched


def _aligned(base: type, tensor_class: Any, recipe: Recipe, kind: str) -> type:
    """A subclass of a quantizer that computes `recipe` with minite_kernels, forward only."""
    role: Any = "weight" if kind == "weight" else "activation"

    class Aligned(base):  # type: ignore[misc, valid-type]
        def quantize(self, tensor: torch.Tensor, **_: Any) -> Any:
            found = tensor_class(
                _quantizer=self, original_shape=tensor.shape, quant_dtype=self.dtype
            )
            return self.update_quantized(tensor, found)

        def update_quantized(self, src: torch.Tensor, dst: Any, **_: Any) -> Any:
            q = quantize(src.detach().reshape(-1, src.shape[-1]).contiguous(), recipe, role=role)
            dst.data, dst.scale, dst.global_amax_row = q.codes, q.block_scale, q.amax.reshape(-1)
            dst.dtype, dst.device, dst.original_shape = src.dtype, src.device, src.shape
            dst.minite_tensor = q
            return dst

        def qgemm(self, *operands: Any, qresult_x: Any, qresult_w: Any, **_: Any) -> torch.Tensor:
            out_dtype = operands[3]
            return gemm(
                qresult_x.minite_tensor, prepare(qresult_w.minite_tensor), out_dtype=out_dtype
            )

    return Aligned


class SharedLinear:
    """The fused linear of several modules with one input: multiplied once, split by rows."""

    def __init__(self, linear: EmulatedLinear) -> None:
        self.linear = linear
        self._source: torch.Tensor | None = None
        self._found: tuple[torch.Tensor, Nvfp4Tensor] | None = None

    def multiply(self, source: torch.Tensor) -> tuple[torch.Tensor, Nvfp4Tensor]:
        """As the linear, of `source` [..., K]; kept while `source` is the same tensor."""
        if self._source is not source or self._found is None:
            self._found = self.linear.multiply(source.reshape(-1, source.shape[-1]))
            self._source = source
        return self._found


class TeModuleLinear(nn.Linear):
    """The rows `start:stop` of a fused `te.Linear`."""

    def __init__(self, shared: SharedLinear, site: QuantizedSite, start: int) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = site.weight_q.shape
        self.shared, self.site, self.start = shared, site, start

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N] in the model's dtype."""
        y, q = self.shared.multiply(input)
        self.site.record(q)
        part = y[:, self.start : self.start + self.out_features]
        return part.reshape(*input.shape[:-1], self.out_features)


def linear_modules(
    names: Sequence[str], modules: Sequence[Any], recipe: Recipe, impl: str
) -> list[TeModuleLinear]:
    """Modules in the place of linears that Transformer Engine holds as one weight."""
    for name, module in zip(names, modules, strict=True):
        if module.bias is not None and impl == "emu":
            raise EngineError(
                f"te: TE's reference GEMM has no bias, {name} has one", "impl=ref has it"
            )
    weight = torch.cat([module.weight.detach() for module in modules])
    shared = SharedLinear(EmulatedLinear(weight, recipe, impl))
    found, start = [], 0
    for name, module in zip(names, modules, strict=True):
        stop = start + module.weight.shape[0]
        site = QuantizedSite(name, shared.linear.weight_q.rows(slice(start, stop)))
        found.append(TeModuleLinear(shared, site, start))
        start = stop
    return found


class TeModuleExperts(TeRefExperts):
    """Two `te.Linear` for each expert: GroupedLinear takes no custom recipe.

    Routing and combination are those of te-ref.
    """

    impl: str
    emulated: dict[str, EmulatedLinear]

    def __init__(self, impl: str, *args: Any) -> None:
        # nn.Module's own __init__ leaves plain attributes alone; _keep needs these during it.
        object.__setattr__(self, "impl", impl)
        object.__setattr__(self, "emulated", {})
        super().__init__(*args)

    def _keep(self, names: list[str], weights: list[torch.Tensor]) -> None:
        linear = EmulatedLinear(torch.cat(weights), self.recipe, self.impl)
        self.emulated[names[0]] = linear
        start = 0
        for name, weight in zip(names, weights, strict=True):
            stop = start + weight.shape[0]
            self.linears[name] = QuantizedSite(name, linear.weight_q.rows(slice(start, stop)))
            start = stop

    def _multiply(
        self, names: list[str], x: torch.Tensor
    ) -> tuple[list[torch.Tensor], Nvfp4Tensor | None]:
        if names[0] not in self.emulated:
            return super()._multiply(names, x)
        y, q = self.emulated[names[0]].multiply(x)
        return list(y.split([self.linears[name].weight_q.shape[0] for name in names], -1)), q
