"""Alignments in a user's own process: applied by one call, restored to the bit, off unless asked."""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from minite_diag.alignments.base import (
    Alignment,
    Application,
    apply_environment,
    check_device,
)
from minite_diag.alignments.learner import align_from_environment, aligned
from minite_diag.alignments.transformers_ops import aligned_attention
from minite_diag.checkpoints import open_demo_moe
from minite_diag.errors import EngineError, UsageError

NAMES = ["norm", "rope", "attention", "activation", "router", "lm-head", "logprobs"]


@pytest.fixture
def model():
    return AutoModelForCausalLM.from_pretrained(open_demo_moe().path, dtype=torch.bfloat16).eval()


def logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor(ids), use_cache=False).logits


def bits(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_everything_is_as_before_after_the_context(model):
    ids = [list(range(20, 60))]
    weights, modules = bits(model.state_dict()), dict(model.named_modules())
    before = logits(model, ids)
    with aligned(model, NAMES) as patched:
        assert set(patched) >= {"norm", "rope", "attention", "activation", "router", "lm_head"}
        inside = logits(model, ids)
    assert not torch.equal(inside, before)
    assert torch.equal(logits(model, ids), before)
    assert same(bits(model.state_dict()), weights)
    assert dict(model.named_modules()).keys() == modules.keys()
    assert all(model.get_submodule(name) is module for name, module in modules.items())


def test_an_error_inside_restores_too(model):
    ids = [list(range(20, 40))]
    before = logits(model, ids)
    with pytest.raises(RuntimeError, match="theirs"), aligned(model, NAMES):
        raise RuntimeError("theirs")
    assert torch.equal(logits(model, ids), before)


def test_a_sequence_of_a_batch_attends_with_the_bits_that_it_has_alone():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, heads, 40, 32, generator=g).bfloat16() for heads in (4, 2, 2))
    lengths = (40, 17, 25)
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    mask = torch.stack([causal & (torch.arange(40) < n) for n in lengths])[:, None]
    together, _ = aligned_attention(None, q, k, v, mask)
    for i, n in enumerate(lengths):
        one = (t[i : i + 1, :, :n] for t in (q, k, v))
        alone, _ = aligned_attention(None, *one, None)
        assert torch.equal(together[i, :n], alone[0])


def test_left_padding_is_refused(model):
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    with aligned(model, ["attention"]), pytest.raises(EngineError, match="on the right"):
        model(input_ids=torch.ones(2, 4, dtype=torch.long), attention_mask=mask, use_cache=False)


def test_the_environment_decides_and_without_it_nothing_changes(model, monkeypatch):
    ids = [list(range(20, 60))]
    monkeypatch.delenv("MINITE_DIAG_ALIGN", raising=False)
    before, modules = logits(model, ids), dict(model.named_modules())
    assert align_from_environment(model) == {}
    assert dict(model.named_modules()) == modules
    monkeypatch.setenv("MINITE_DIAG_ALIGN", "attention, pow2-scale")
    assert set(align_from_environment(model)) == {"attention"}
    assert not torch.equal(logits(model, ids), before)


def test_settings_do_nothing_to_a_model_and_say_so(model):
    with (
        pytest.raises(UsageError, match="'pow2-scale' replaces nothing"),
        aligned(model, ["pow2-scale"]),
    ):
        pass


def test_the_shell_s_alignments_do_not_reach_our_own_engines(monkeypatch):
    monkeypatch.setenv("MINITE_DIAG_ALIGN", "norm")
    assert apply_environment("vllm", []) == {}
    assert "MINITE_DIAG_ALIGN" not in os.environ


def test_variables_are_set_before_an_engine_loads(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_ATTN_SPLIT_KV", raising=False)
    assert apply_environment("vllm", ["decode-as-prefill", "norm"]) == {
        "VLLM_CPU_ATTN_SPLIT_KV": "0"
    }
    assert os.environ["VLLM_CPU_ATTN_SPLIT_KV"] == "0"
    monkeypatch.delenv("VLLM_CPU_ATTN_SPLIT_KV")
    assert apply_environment("te", ["decode-as-prefill"]) == {}


def test_an_alignment_for_another_device_is_an_error():
    check_device("vllm", ["decode-as-prefill"], "cpu")
    with pytest.raises(EngineError, match="it is for cuda"):
        check_device("vllm", ["batch-invariant"], "cpu")
    with pytest.raises(EngineError, match="it is for cpu"):
        check_device("vllm", ["decode-as-prefill"], "NVIDIA H200")


def test_devices_are_known_ones():
    from minite_diag.alignments.base import known_alignments

    alignment: Alignment
    for alignment in known_alignments().values():
        how: Application
        for how in alignment.engines.values():
            assert how.device in ("", "cpu", "cuda")
            assert how.versions


@pytest.fixture(scope="module")
def trained():
    """FP32, so that an aligned forward and a native one have nearly the same values."""
    return AutoModelForCausalLM.from_pretrained(open_demo_moe().path, dtype=torch.float32).train()


TRAINED = ["norm", "rope", "attention", "activation", "router", "lm-head"]


def gradients(model):
    ids = torch.arange(30, 54)[None] * 3 % 200
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {name: p.grad.flatten().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("names", [*([name] for name in TRAINED), TRAINED], ids="+".join)
def test_every_parameter_has_its_gradient_under_alignments(trained, names):
    """The objective's gradients flow through the aligned ops: dgrad and wgrad of every linear."""
    native = gradients(trained)
    with aligned(trained, names):
        found = gradients(trained)
    assert found.keys() == native.keys()
    for name, gradient in found.items():
        similar = torch.nn.functional.cosine_similarity(gradient, native[name], dim=0)
        assert similar > 0.999, name
        assert gradient.norm() / native[name].norm() == pytest.approx(1, abs=0.01), name


def test_alignments_touch_neither_parameters_nor_their_names(trained):
    before = {name: (id(p), p.detach().clone()) for name, p in trained.named_parameters()}
    keys = list(trained.state_dict())
    with aligned(trained, TRAINED):
        gradients(trained)
        after = dict(trained.named_parameters())
        assert list(trained.state_dict()) == keys
    assert after.keys() == before.keys()
    for name, parameter in after.items():
        identity, bits_before = before[name]
        assert id(parameter) == identity, name
        assert torch.equal(parameter.detach(), bits_before), name


def test_a_step_of_the_optimizer_reaches_the_aligned_model(trained):
    """What an op keeps of a weight must not outlive it, however the weight was written."""
    ids = [list(range(40, 60))]
    head = trained.lm_head.weight
    with aligned(trained, ["lm-head"]):
        before = logits(trained, ids)
        head.data.mul_(2.0)
        with torch.no_grad():
            doubled = trained(input_ids=torch.tensor(ids), use_cache=False).logits
            head.mul_(0.5)
        assert torch.equal(doubled, 2 * before)
        assert torch.equal(logits(trained, ids), before)
