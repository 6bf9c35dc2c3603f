"""A word without quotes, as a model wrote it in Python's or JSON's way, as JSON.

The law: a number keeps its digits; only what JSON does not allow is rewritten. What is no literal is not guessed at.
"""

import re

WORDS = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_DECIMAL = re.compile(r"([+-]?)(0|[1-9]\d*|)(?:(\.)(\d*))?([eE][+-]?\d+)?", re.ASCII)
_RADIX = re.compile(r"[+-]?0(?:[xX][\da-fA-F]+|[oO][0-7]+|[bB][01]+)", re.ASCII)
_GROUPED = re.compile(r"(?<=\d)_(?=\d)", re.ASCII)
_GROUPED_RADIX = re.compile(r"(?<=[\da-fA-FxXoObB])_(?=[\da-fA-F])", re.ASCII)


def literal(word: str) -> str | None:
    """`word` as JSON, where it is a number, a truth value or nothing; None where it is any other word. The digits of
    `007` say more than a number can, so it is a word."""
    if word in WORDS:
        return WORDS[word]
    if _JSON_NUMBER.fullmatch(word):
        return word
    digits = _GROUPED_RADIX.sub("", word)
    if _RADIX.fullmatch(digits):
        return str(int(digits, 0))
    number = _DECIMAL.fullmatch(_GROUPED.sub("", word))
    if number is None or not (number[2] or number[4]):
        return None
    sign, whole, point, fraction, exponent = number.groups(default="")
    return f"{sign.strip('+')}{whole or '0'}{point and '.' + (fraction or '0')}{exponent}"
