"""`run_plugin.py CHECKPOINT [JSON]`: bare vLLM, our tool not in charge, only the plugin's environment.

JSON holds more arguments of vLLM's LLM. Prints one JSON line: log-probabilities alone, in a batch, and decoded; and what was patched.
"""

import json
import os
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams

prompts = json.loads(sys.stdin.read())
llm = LLM(
    sys.argv[1],
    dtype="bfloat16",
    enforce_eager=True,
    enable_prefix_caching=False,
    skip_tokenizer_init=True,
    max_model_len=512,
    moe_backend="emulation",
    **(json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}),
)


def logprobs(batch):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in batch], params, use_tqdm=False)
    return [
        [entry[token].logprob for entry, token in zip(o.prompt_logprobs[1:], p[1:], strict=True)]
        for o, p in zip(outputs, batch, strict=True)
    ]


params = SamplingParams(
    temperature=1.0, seed=0, max_tokens=6, logprobs=0, ignore_eos=True, detokenize=False
)
decoded = llm.generate([{"prompt_token_ids": prompts[0]}], params, use_tqdm=False)[0].outputs[0]
tokens = list(decoded.token_ids)
print(
    json.dumps(
        {
            "alone": [logprobs([p])[0] for p in prompts],
            "batch": logprobs(prompts),
            "tokens": tokens,
            "decoded": [e[t].logprob for e, t in zip(decoded.logprobs, tokens, strict=True)],
            "rescored": logprobs([prompts[0] + tokens])[0][len(prompts[0]) - 1 :],
        }
    )
)
