"""The text that `demo-moe` is trained on: the Python standard library and generated lines.

It knows nothing of models. Every sample is either read from the standard library of the
interpreter that runs it (Python Software Foundation licence) or generated here from a seeded
random generator, so no download and no third-party text is involved. Invariant: token ids below
256 are the bytes themselves; the three ids above are the specials named here.
"""

from __future__ import annotations

import json
import random
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

END_OF_TEXT, IM_START, IM_END = 256, 257, 258
SPECIAL_TOKENS = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
# Character tables are data, not text: they would be a tenth of the corpus.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "__pycache__", "_bundled"}
SKIPPED_FOLDERS |= {"site-packages", "dist-packages"}

_NAMES = "Ada Alan Grace Edsger Barbara Donald Radia Ken Frances Tony Lynn Dennis Mary Niklaus"
_NOUNS = "apple book river engine window letter garden number signal table forest mirror"
_ADJECTIVES = "red quiet heavy small bright early hidden simple broken distant"
_VERBS = "sees finds moves counts opens keeps follows measures"
_CITIES = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Greece": "Athens",
}
_WORLD = (
    "Guten Morgen, heute haben wir {n} neue Bücher über den Fluss gekauft.",
    "Bonjour, il y a {n} fenêtres ouvertes dans la petite maison près de la forêt.",
    "Buenos días, tengo {n} manzanas y {m} cartas en la mesa del jardín.",
    "Oggi abbiamo contato {n} alberi e {m} uccelli vicino al fiume.",
    "Hoje temos {n} livros e {m} cartas; amanhã não teremos nenhuma.",
    "Сегодня мы нашли {n} книг и {m} писем на большом столе.",
    "今天我们有{n}本书和{m}封信, 明天再来。",
    "今日は{n}冊の本と{m}通の手紙があります。",
    "Σήμερα έχουμε {n} βιβλία και {m} γράμματα.",
    "오늘은 책이 {n}권, 편지가 {m}통 있습니다.",
)


def stdlib_files() -> list[Path]:
    """The standard library's source files, sorted, without tests and character tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (p for p in root.rglob("*.py") if not SKIPPED_FOLDERS & set(p.relative_to(root).parts))
    return sorted(files)


def is_held_out(path: Path) -> bool:
    """Whether a source file belongs to the evaluation part (about one in twenty)."""
    return zlib.crc32(path.name.encode()) % 20 == 0


def source_documents(*, held_out: bool) -> Iterator[list[int]]:
    """The token ids of each standard-library file of one part."""
    for path in stdlib_files():
        if is_held_out(path) == held_out:
            yield [*path.read_bytes(), END_OF_TEXT]


def _sentence(rng: random.Random) -> str:
    words = (_NAMES, _VERBS, _ADJECTIVES, _NOUNS, _NOUNS)
    subject, verb, adjective, noun, place = (rng.choice(w.split()) for w in words)
    return f"{subject} {verb} the {adjective} {noun} near the {place}."


def _sum(rng: random.Random) -> tuple[str, int]:
    a, b = rng.randrange(100), rng.randrange(100)
    op = rng.choice("+-*")
    return f"{a} {op} {b}", {"+": a + b, "-": a - b, "*": a * b}[op]


def arithmetic(rng: random.Random) -> list[int]:
    """Lines of sums with their results."""
    lines = (f"{text} = {value}\n" for text, value in (_sum(rng) for _ in range(12)))
    return [*"".join(lines).encode(), END_OF_TEXT]


def json_records(rng: random.Random) -> list[int]:
    """A list of small JSON objects."""
    records = [
        {
            "id": rng.randrange(1000),
            "name": rng.choice(_NAMES.split()),
            "tags": rng.sample(_NOUNS.split(), rng.randrange(1, 4)),
            "score": round(rng.random(), 3),
            "active": rng.random() < 0.5,
            "next": None,
        }
        for _ in range(rng.randrange(1, 5))
    ]
    return [*json.dumps(records, indent=rng.choice([None, 2])).encode(), END_OF_TEXT]


def _exchange(rng: random.Random) -> tuple[str, str]:
    kind = rng.randrange(5)
    if kind == 0:
        text, value = _sum(rng)
        return f"What is {text}?", f"{text} = {value}."
    if kind == 1:
        country = rng.choice(sorted(_CITIES))
        question = f"What is the capital of {country}?"
        return question, f"The capital of {country} is {_CITIES[country]}."
    if kind == 2:
        words = rng.sample(_NOUNS.split(), 4)
        return f"Sort these words: {', '.join(words)}.", ", ".join(sorted(words)) + "."
    if kind == 3:
        word = rng.choice(_NOUNS.split())
        return f"Spell {word} backwards.", f"{word[::-1]}"
    text = _sentence(rng)
    return f"Repeat after me: {text}", text


def chat(rng: random.Random) -> list[int]:
    """A conversation in the chat template's form, specials included."""
    ids: list[int] = []
    for _ in range(rng.randrange(1, 4)):
        for role, text in zip(("user", "assistant"), _exchange(rng), strict=True):
            ids += [IM_START, *f"{role}\n{text}".encode(), IM_END, *b"\n"]
    return [*ids, END_OF_TEXT]


def multilingual(rng: random.Random) -> list[int]:
    """A few sentences in several languages and scripts."""
    sentences = (
        rng.choice(_WORLD).format(n=rng.randrange(2, 99), m=rng.randrange(2, 99)) for _ in range(4)
    )
    return [*" ".join(sentences).encode(), END_OF_TEXT]


def prose(rng: random.Random) -> list[int]:
    """A paragraph of simple English sentences."""
    return [*" ".join(_sentence(rng) for _ in range(6)).encode(), END_OF_TEXT]


def repeats(rng: random.Random) -> list[int]:
    """One short pattern, many times over."""
    pattern = "".join(rng.choice("abcdefgh 0123456789-") for _ in range(rng.randrange(1, 9)))
    return [*(pattern * rng.randrange(8, 40)).encode(), END_OF_TEXT]


GENERATORS: dict[str, Callable[[random.Random], list[int]]] = {
    "arithmetic": arithmetic,
    "json": json_records,
    "chat": chat,
    "multilingual": multilingual,
    "prose": prose,
    "repeats": repeats,
}


def generated_documents(kind: str, *, seed: int, num_tokens: int) -> Iterator[list[int]]:
    """Documents of one generated kind, about `num_tokens` ids in total, the same for one seed."""
    rng = random.Random(f"{kind}-{seed}")  # noqa: S311
    total = 0
    while total < num_tokens:
        document = GENERATORS[kind](rng)
        total += len(document)
        yield document
