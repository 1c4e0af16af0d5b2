"""The prompts of the goldens: chat, code, several languages, digits, one of about 300 tokens, one of a single token."""

from __future__ import annotations

_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"

_ARTICLE = (
    "The history of paper begins long before printing. In the second century, craftsmen in China mixed mulberry bark, hemp, "
    "rags and water, mashed the mixture into pulp, pressed out the liquid and hung the thin mat to dry in the sun. Paper "
    "was lighter than bamboo and cheaper than silk, and it spread along the trade routes to Samarkand, Baghdad and Cairo. "
    "By the tenth century the libraries of the Islamic world held hundreds of thousands of volumes. The mills of Fabriano "
    "in Italy brought three inventions in the thirteenth century: hammers driven by water, sizing with animal glue instead "
    "of starch, and the watermark, by which a maker could be told from his rivals. When Gutenberg set his first pages, "
    "there was already enough paper to feed the presses. Demand outran the supply of rags for three hundred years; people "
    "were even forbidden to be buried in linen. Only in the nineteenth century did wood replace cloth: first ground "
    "mechanically, then cooked with sulphite, which gave long and strong fibres. Paper became so cheap that newspapers cost "
    "a penny, and so acidic that the books of that age crumble in our hands today. Modern mills make more than a thousand "
    "metres of paper a minute, recycle most of their water, and sell more cardboard than anything else.\n\nIn short,"
)


def _chat(text: str) -> str:
    return f"{_SYSTEM}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS: tuple[str, ...] = (
    _chat("What is the capital of France? Answer in one sentence."),
    _chat("Explain to a ten-year-old why the sky is blue."),
    _chat("Write a haiku about the sea."),
    _chat("List five fruits that are red."),
    _chat("Give me a recipe for pancakes."),
    _chat("What is 17 + 25?"),
    _chat("Translate to French: Good morning, my friend."),
    _chat("Who wrote Romeo and Juliet, and when?"),
    "def fibonacci(n):\n    ",
    "#include <stdio.h>\n\nint main(void) {\n    ",
    "SELECT name, count(*) FROM orders",
    '{"name": "Ada", "age": 36, "languages": [',
    "Die Hauptstadt von Deutschland ist",
    "La capitale de l'Italie est",
    "日本の首都は",
    "Москва — это",
    "3.14159265358979",
    "1 2 3 4 5 6 7 8 9 10 11 12",
    _ARTICLE,
    "The",
)
