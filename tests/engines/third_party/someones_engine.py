"""A third party's engine: transformers, looked at with forward hooks. All that an engine needs."""

import importlib.metadata

import torch
from transformers import AutoModelForCausalLM

from minite_diag.capture.hooks import attach
from minite_diag.engines.base import Engine, EngineInfo, Evidence, Layout, ScoredTokens
from minite_diag.engines.base import TokenSequence as Tokens
from minite_diag.errors import UsageError
from minite_diag.trace.store import Row


class SomeonesEngine(Engine):
    name = "someones"

    def load(self, spec, plan):
        if spec.options:
            raise UsageError(f"someones has no option {next(iter(spec.options))!r}", "leave it out")
        dtype = getattr(torch, plan.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(spec.checkpoint, dtype=dtype).eval()
        return EngineInfo(
            label="someones",
            version=importlib.metadata.version("transformers"),
            device="cpu",
            dtype=plan.dtype,
            layout=Layout(),
            evidence=(Evidence("all", "native", "transformers"),),
            invisible={"*.experts.*": "not hooked", "*.gate:*": "not hooked"},
        )

    def observe(self, recorder):
        self.recorder = recorder
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Linear):
                kind = "logits" if name == "lm_head" else "output"
                recorder.static(name, "weight", module.weight)
                attach(module, name, recorder, output_kind=kind)

    def score(self, sequence):
        key = (sequence.mode, sequence.source, sequence.probe)
        rows = [Row(*key, i, "prefill") for i in range(len(sequence.token_ids))]
        self.recorder.begin_call(rows)
        ids = torch.tensor([sequence.token_ids])
        with torch.inference_mode():
            logprobs = self.model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
        return ScoredTokens(sequence, (None, *found), ("prefill",) * len(sequence.token_ids))

    def sample(self, sequence, num_tokens, seed):
        torch.manual_seed(seed)
        prompt = torch.tensor([sequence.token_ids[: sequence.prompt_length]])
        sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
        length = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        active, self.recorder.active = self.recorder.active, False
        ids = self.model.generate(prompt, **sampling, **length)[0].tolist()
        self.recorder.active = active
        args = (sequence.source, sequence.probe, tuple(ids), sequence.prompt_length)
        return self.score(Tokens("sample", *args))
