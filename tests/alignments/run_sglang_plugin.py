"""`run_sglang_plugin.py CHECKPOINT`: SGLang's own Engine, our tool not in charge, only the plugin.

Engine starts its scheduler in a process of its own, as a server does. Reads prompts from stdin and
prints one JSON line: log-probabilities alone, in a batch, and decoded.
"""

import json
import os
import sys

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    from sglang.srt.entrypoints.engine import Engine

    prompts = json.loads(sys.stdin.read())
    engine = Engine(
        model_path=sys.argv[1],
        dtype="bfloat16",
        device="cpu",
        quantization="modelopt_fp4",
        moe_runner_backend="flashinfer_cutlass",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        skip_tokenizer_init=True,
        context_length=512,
        max_total_tokens=4096,
        max_running_requests=4,
        chunked_prefill_size=-1,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        mem_fraction_static=0.3,
        log_level="warning",
    )

    def generate(batch, tokens, temperature, start):
        parameters = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
        return [
            output["meta_info"]
            for output in engine.generate(
                input_ids=batch,
                sampling_params=parameters,
                return_logprob=True,
                logprob_start_len=start,
            )
        ]

    def score(batch):
        return [
            [entry[0] for entry in found["input_token_logprobs"][1:]]
            for found in generate(batch, 1, 0.0, 0)
        ]

    drawn = generate([prompts[0]], 6, 1.0, -1)[0]["output_token_logprobs"]
    tokens = [entry[1] for entry in drawn]
    result = {
        "alone": [score([prompt])[0] for prompt in prompts],
        "batch": score(prompts),
        "tokens": tokens,
        "decoded": [entry[0] for entry in drawn],
        "rescored": score([prompts[0] + tokens])[0][len(prompts[0]) - 1 :],
    }
    print(json.dumps(result), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
