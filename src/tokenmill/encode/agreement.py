"""Whether the fast engine gives the ids of the reference, shown on a sample of the corpus and on hard texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenmill.encode.fast import fast_engine
from tokenmill.encode.frame import encode_framed, frame
from tokenmill.encode.load import ENGINES, kind_of, open_tokenizer
from tokenmill.encode.tokenizer import Tokenizer, join
from tokenmill.errors import TokenizerError
from tokenmill.types import Encoded

_CONTROL_STRINGS = (
    "<s>", "</s>", "<unk>", "<pad>", "<mask>", "<bos>", "<eos>", "[BOS]", "[EOS]", "[PAD]", "[UNK]", "[CLS]",
    "[SEP]", "[MASK]", "<|endoftext|>", "<|endofprompt|>", "<|startoftext|>", "<|fim_prefix|>",
    "<|fim_middle|>", "<|fim_suffix|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|eos|>", "<|pad|>",
    "<|user_start|>", "<|assistant_end|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<<SYS>>",
    "<tool_call>", "<think>", "</think>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
    "<|channel|>", "<|return|>", "<0x0A>",
)  # fmt: skip

ADVERSARIAL: tuple[str, ...] = (
    "", " ", "\n",
    *_CONTROL_STRINGS,
    *(f"see {name}{name}in text" for name in _CONTROL_STRINGS),
    "".join(_CONTROL_STRINGS),
    # Parts of control strings, which must not be completed or swallowed.
    "<|endoftext", "|>", "<|endoftext|", "< |endoftext|>", "<|ENDOFTEXT|>", "<||endoftext||>",
    # White space: runs, kinds, and where they stand.
    "a  b   c    d", "  leading", "trailing  ", " \n \n\n x", "\n\n\n\n", "\t\tx\t y",
    "a\r\nb\r\n\r\nc", "\r\r\n\n\r", "a\x0bb\x0cc\x1cd\x1fe",
    "a\xa0b\u2003c\u3000d\u2028e\u2029f\x85g", "a\u200bb\u200c\u2060c", " " * 300 + "x", "x" + "\n" * 200,
    "\u180e a \u180e\u180e b\u180e c \t\u180ed", "b \u180e! \u180e/ \u180e_ \u180e\u05e9 \u180e\x00",
    # Apostrophes and case, which patterns treat as contractions.
    "I'll you're he'd we've don't it's I'M THEY'RE HE'S 'tis ''s' 'Sx",
    "\u017f'\u017f'LL a'\u017f b'\u017fx \u212a'\u212a", "\u017f'\u017f'LLLL \u6587'\u017f'SL",
    # Letters: composed (NFC) and decomposed (NFD), case pairs, marks alone, scripts without spaces.
    "caf\u00e9 cafe\u0301 \u00c5 A\u030a \u212b \ufb01 \ufb03 \u00bd \u2167 \u2460 \u00b2",
    "\u0301\u0301 a\u0301\u0323\u0307", "\u0130\u0131S\u00df\u1e9e\u01c5\u02b0\u00aa\u00ba",
    "한국어 \u1112\u1161\u11ab", "क्षि त्र ம் ক্ষ", "ไทยไม่มีวรรค", "中文、日本語。カタカナ", "Ωμέγα Жизнь қазақ",
    "\U0001d7d8\U0001d7d9 \U00020000\U0002a6df \U00016d40",
    # Right to left: vowel marks, Arabic digits, and the controls that turn the direction.
    "العَرَبِيَّةُ ١٢٣ ۴۵۶", "שָׁלוֹם \u202eabc\u202c \u2067x\u2069",
    # Emoji: surrogate pairs in UTF-16, joiners (ZWJ), modifiers, flags, variation selectors.
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f44d\U0001f3fd",
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7 \u2764\ufe0f \u263a\ufe0e \U0001fae0",
    # Numbers, symbols, code.
    "1 12 123 1234 12345 3.14159e-10 1,000,000 0x1F 1_000", "!?!?...---===***###$$$", "a.b,c;d:e/f\\g|h",
    "https://example.org/a?b=c&d=%20#e user@example.org", "snake_case camelCase XMLHttpRequest v2Beta3",
    "def f(x):\n\treturn  {'a': [1, 2]}  # c\n\n\n", '{"k": "v\\n\\u00e9", "n": null}',
    "<p class='x'>&nbsp;</p><!-- c -->",
    # Long runs without a place to split.
    "a" * 2000, "Ab" * 700, "7" * 1000, "中" * 700, "a\u0301" * 300, "=" * 600,
    # Characters that end or start strings elsewhere, and such as no table knows.
    "\x00", "a\x00b\x00\x00", "\ufeff", "a\ufeffb\ufeff", "\ufffd\ufffe\uffff\U0010ffff",
    "\x01\x02\x7f\x80\x9f", "\ue000\U000f0000 \u0378 \U000e0041",
)  # fmt: skip
"""Texts on which tokenizers have been seen to differ, or could; a corpus sample may hold none of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disagreement:
    """The first text that two engines encode differently."""

    text: str
    index: int
    """First token that differs."""
    fast_ids: tuple[int, ...]
    """At most eight, from `index`."""
    reference_ids: tuple[int, ...]


def find_disagreement(fast: Tokenizer, reference: Tokenizer, sample: Sequence[str]) -> Disagreement | None:
    """Return the first text that two engines encode differently; see `texts_to_compare`."""
    texts = texts_to_compare(reference, sample)
    return _first_difference(texts, fast.encode(texts), reference.encode(texts))


def texts_to_compare(tokenizer: Tokenizer, sample: Sequence[str]) -> list[str]:
    """Return the sample, `ADVERSARIAL`, and the tokenizer's own control strings, bare and inside text."""
    own = [shown for name in tokenizer.special_ids for shown in (name, f"see {name}{name}in text", f"x {name} y")]
    return [*sample, *ADVERSARIAL, *own]


def trusted(
    spec: str,
    sample: Sequence[str] = (),
    *,
    add_bos: bool | None = None,
    add_eos: bool | None = None,
    bos_token: str | None = None,
    eos_token: str | None = None,
) -> tuple[Tokenizer, str | None]:
    """Open a tokenizer with the fast engine if it agrees with the reference, else with the reference.

    The second value is None, or the sentence to show the user: why the slower engine is used. A worker process
    opens the same one with `open_tokenizer(spec, engine=tokenizer.engine.split()[0])`.
    """

    def opened(engine: str) -> Tokenizer:
        return open_tokenizer(
            spec, add_bos=add_bos, add_eos=add_eos, bos_token=bos_token, eos_token=eos_token, engine=engine
        )

    fast_name, *others = ENGINES[kind_of(spec)]
    if not others:
        return opened(fast_name), None
    reference = opened(others[0])
    texts = texts_to_compare(reference, sample)
    # What the reference cannot load or encode is an error of the file or the text, and stays one.
    expected = reference.encode(texts)
    try:
        fast = opened(fast_name)
        found = _first_difference(texts, fast.encode(texts), expected)
        # Each alone: a text that the fast engine leaves to the reference would take the others with it.
        framed = join([encode_framed(fast, [text]).ids for text in texts])
        found = found or _first_difference(texts, framed, frame(expected, fast.identity))
    except TokenizerError as error:
        return reference, (
            f"tokenizer {spec!r}: {fast_engine()} cannot be used ({error.__cause__ or error}), "
            f"so the slower engine {reference.engine} is used"
        )
    if found is None:
        return fast, None
    return reference, (
        f"tokenizer {spec!r}: {fast.engine} and {reference.engine} differ on the text {_shortened(found.text)} "
        f"from token {found.index} ({list(found.fast_ids)} instead of {list(found.reference_ids)}), "
        f"so the slower engine {reference.engine} is used"
    )


def _first_difference(texts: Sequence[str], fast: Encoded, reference: Encoded) -> Disagreement | None:
    for document, text in enumerate(texts):
        ours = fast.ids[fast.offsets[document] : fast.offsets[document + 1]]
        theirs = reference.ids[reference.offsets[document] : reference.offsets[document + 1]]
        if np.array_equal(ours, theirs):
            continue
        common = min(ours.size, theirs.size)
        differs = np.flatnonzero(ours[:common] != theirs[:common])
        index = int(differs[0]) if differs.size else common
        return Disagreement(
            text=text,
            index=index,
            fast_ids=tuple(ours[index : index + 8].tolist()),
            reference_ids=tuple(theirs[index : index + 8].tolist()),
        )
    return None


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= 48 else f"{text[:48]!r}... ({len(text)} characters)"
