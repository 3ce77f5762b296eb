"""Quantize FP32, BF16 or FP16 matrices to NVFP4 under a recipe, and back.

``quantize`` checks its arguments, finds the global scale and hands over to the implementation;
what is computed is in the recipe, how in ``_ref.py`` and ``_triton.py``. Invariant: for one recipe
all implementations return the same bytes (stochastic rounding excepted: the same distribution).
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite_kernels.dispatch import Impl, select
from minite_kernels.nvfp4.format import BLOCK_SIZE, E2M1_MAX, decode_e2m1
from minite_kernels.nvfp4.layout import unpack_codes
from minite_kernels.nvfp4.quantize import _ref
from minite_kernels.nvfp4.quantize._ref import GlobalScale
from minite_kernels.nvfp4.recipe import OperandRecipe, Recipe, Role, get_recipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

__all__ = [
    "amax_of",
    "decoded_values",
    "dequantize",
    "given_scale",
    "global_scale",
    "quantize",
]


def quantize(
    x_MK: Tensor,
    recipe: Recipe | str,
    *,
    role: Role = "activation",
    amax: Tensor | None = None,
    global_encode_scale: Tensor | None = None,
    global_decode_scale: Tensor | None = None,
    impl: Impl = "auto",
    generator: torch.Generator | None = None,
) -> Nvfp4Tensor:
    """Quantize x [M, K] (FP32, BF16, FP16; K even) along K exactly as the recipe's engine does.

    At most one of ``amax``, ``global_encode_scale`` (2688/amax) and ``global_decode_scale``
    (amax/2688) may be given, as FP32 [] or, for per-token recipes, [M]; without them the amax is
    taken from x. A recipe with a static scale requires one. ``generator`` seeds stochastic
    rounding. Promise: the same bytes from every ``impl``, for any number of other rows when the
    amax is given or per token. Raises ValueError or TypeError with what to pass instead.
    """
    recipe = get_recipe(recipe)
    operand = recipe.operand(role)
    _check_input(x_MK)
    given = given_scale(x_MK, recipe, role, amax, global_encode_scale, global_decode_scale)
    module = select("quantize", __name__, impl, x_MK.device)
    if given is None and operand.amax_scope == "token":
        codes, block_scale, scale = module.quantize_tokens(operand, x_MK, generator)
    else:
        scale = module.tensor_scale(operand, x_MK) if given is None else given
        codes, block_scale = module.quantize_rows(operand, x_MK, scale, generator)
    return Nvfp4Tensor(
        codes=codes,
        block_scale=block_scale,
        amax=scale.amax,
        global_encode_scale=scale.encode,
        global_decode_scale=scale.decode,
        shape=(x_MK.shape[0], x_MK.shape[1]),
        recipe=recipe,
        role=role,
    )


def decoded_values(
    x_MK: Tensor,
    recipe: Recipe | str,
    *,
    role: Role = "activation",
    amax: Tensor | None = None,
    global_encode_scale: Tensor | None = None,
) -> tuple[Tensor, Nvfp4Tensor]:
    """Quantize x with the Triton kernels into exact FP16 values q*s [M, 16*ceil(K/16)], unpacked.

    The second result carries the global scales; its codes are empty. For GEMMs that would decode
    the codes at once.
    """
    recipe = get_recipe(recipe)
    operand = recipe.operand(role)
    _check_input(x_MK)
    from minite_kernels.nvfp4.quantize import _triton

    scale = given_scale(x_MK, recipe, role, amax, global_encode_scale, None)
    if scale is None and operand.amax_scope == "token":
        values, scale = _triton.quantize_token_values(operand, x_MK)
    else:
        scale = _triton.tensor_scale(operand, x_MK) if scale is None else scale
        values = _triton.quantize_values(operand, x_MK, scale)
    empty = x_MK.new_empty(0, dtype=torch.uint8)
    shape = (x_MK.shape[0], x_MK.shape[1])
    meta = Nvfp4Tensor(empty, empty, scale.amax, scale.encode, scale.decode, shape, recipe, role)
    return values, meta


def amax_of(x_MK: Tensor, recipe: Recipe | str, *, role: Role = "activation") -> Tensor:
    """Amax of x over the recipe's scope as FP32: [] per tensor, [M] per token."""
    return _ref.amax_of(get_recipe(recipe).operand(role), x_MK)


def global_scale(
    x_MK: Tensor,
    recipe: Recipe | str,
    *,
    role: Role = "activation",
    amax: Tensor | None = None,
    global_encode_scale: Tensor | None = None,
    global_decode_scale: Tensor | None = None,
) -> GlobalScale:
    """Global scales with which ``quantize`` would quantize x: FP32, [] or [M] per token."""
    recipe = get_recipe(recipe)
    given = given_scale(x_MK, recipe, role, amax, global_encode_scale, global_decode_scale)
    return _ref.scale_of(recipe.operand(role), x_MK) if given is None else given


def given_scale(
    x_MK: Tensor,
    recipe: Recipe,
    role: Role,
    amax: Tensor | None,
    encode: Tensor | None,
    decode: Tensor | None,
    dtype: torch.dtype | None = None,
) -> GlobalScale | None:
    """Scales from what the caller passed; None if they are to be taken from x.

    ``dtype`` is that of the quantized tensor where it is not x's. Raises ValueError for more than one, and for none where the recipe's scale is static.
    """
    operand = recipe.operand(role)
    if sum(value is not None for value in (amax, encode, decode)) > 1:
        raise ValueError("pass one of amax, global_encode_scale and global_decode_scale, not more")
    if amax is not None:
        return _ref.global_scale_of_amax(operand, _scalars(amax, x_MK), dtype or x_MK.dtype)
    if encode is not None:
        return _of_encode(operand, _scalars(encode, x_MK))
    if decode is not None:
        return _of_decode(operand, _scalars(decode, x_MK))
    if operand.amax_scope == "static":
        raise ValueError(
            f"recipe {recipe.name!r} has a static {role} scale: pass amax=, global_encode_scale= "
            "or global_decode_scale="
        )
    return None


def _of_encode(operand: OperandRecipe, encode: Tensor) -> GlobalScale:
    one = torch.ones((), dtype=torch.float32, device=encode.device)
    amax = torch.div(one * (E2M1_MAX * operand.e4m3_max), encode)
    return GlobalScale(amax, encode, torch.div(one, encode))


def _of_decode(operand: OperandRecipe, decode: Tensor) -> GlobalScale:
    one = torch.ones((), dtype=torch.float32, device=decode.device)
    return GlobalScale(decode * (E2M1_MAX * operand.e4m3_max), torch.div(one, decode), decode)


def _scalars(value: Tensor, x_MK: Tensor) -> Tensor:
    """Check a given scale: FP32, one number or one a row, on x's device; [1] becomes []."""
    if value.dtype != torch.float32:
        raise TypeError(f"global scales and amax are float32, got {value.dtype}")
    if value.device != x_MK.device:
        raise ValueError(f"the scale is on {value.device}, x on {x_MK.device}")
    if value.ndim == 0:
        return value
    if value.numel() == 1:
        return value.reshape(())
    if value.numel() == x_MK.shape[0]:
        return value.reshape(-1)
    raise ValueError(f"a scale has 1 or M={x_MK.shape[0]} numbers, got shape {tuple(value.shape)}")


def _check_input(x_MK: Tensor) -> None:
    if x_MK.ndim != 2:
        raise ValueError(f"quantize takes [M, K], got {x_MK.ndim} dims; flatten leading ones first")
    if x_MK.dtype not in INPUT_DTYPES:
        raise TypeError(f"quantize takes float32, bfloat16 or float16, got {x_MK.dtype}")
    if x_MK.shape[1] % 2:
        raise ValueError(f"K must be even to pack two codes a byte, got K={x_MK.shape[1]}")


def dequantize(q: Nvfp4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode to [M, K] with the recipe's own expression in FP32, then one cast to ``dtype``."""
    m, k = q.shape
    scale = GlobalScale(q.amax, q.global_encode_scale, q.global_decode_scale)
    factor_MB = _ref.dequantize_factor(q.operand, q.block_scale.to(torch.float32), scale)
    value = decode_e2m1(unpack_codes(q.codes))
    padded = torch.nn.functional.pad(value, (0, -k % BLOCK_SIZE)).view(
        m, -(-k // BLOCK_SIZE), BLOCK_SIZE
    )
    return (padded * factor_MB[..., None]).flatten(1)[:, :k].to(dtype)
