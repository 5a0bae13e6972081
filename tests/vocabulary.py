"""Counts tokens with other people's software: a GGUF file's vocabulary, and tiktoken's merging.

Only for vocabularies in GPT-2's manner, such as the default model's.
"""

import re
import struct

import tiktoken

SIZES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# How GPT-2 cuts a text before it merges; its digits stand alone in the default model.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def read_metadata(path):
    """All metadata of a GGUF file, which ends where its tensors' names begin."""
    with open(path, "rb") as file:
        def number(kind):
            return struct.unpack("<" + kind, file.read(struct.calcsize("<" + kind)))[0]

        def value(kind):
            if kind == STRING:
                return file.read(number("Q")).decode("utf-8", "replace")
            if kind == ARRAY:
                of, count = number("I"), number("Q")
                return [value(of) for _ in range(count)]
            return number(SIZES[kind])

        assert file.read(4) == b"GGUF" and number("I") == 3
        _, count = number("Q"), number("Q")
        return {value(STRING): value(number("I")) for _ in range(count)}


def byte_of_letter():
    """GPT-2 spells bytes as letters: printable ones as themselves, the others from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


class Vocabulary:
    def __init__(self, path):
        data, letters = read_metadata(path), byte_of_letter()
        assert data["tokenizer.ggml.pre"] == "smollm"

        def spell(token):
            return bytes(letters[letter] for letter in token)

        ranks = {bytes([byte]): byte for byte in range(256)}
        for merge in data["tokenizer.ggml.merges"]:
            ranks.setdefault(spell(merge.replace(" ", "")), len(ranks))
        kinds = zip(data["tokenizer.ggml.tokens"], data["tokenizer.ggml.token_type"])
        self.controls = {token for token, kind in kinds if kind == 3}
        self.pieces = ranks.keys() | {token.encode() for token in self.controls}
        self.encoding = tiktoken.Encoding(
            "it", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}
        )
        names = "|".join(map(re.escape, sorted(self.controls, key=len, reverse=True)))
        self.cut = re.compile(rf"({names}|\d)")

    def count(self, text):
        """How many tokens a text has, control tokens among them."""
        parts = [part for part in self.cut.split(text) if part]
        return sum(
            1 if part in self.controls else len(self.encoding.encode_ordinary(part))
            for part in parts
        )
