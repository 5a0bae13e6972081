#!/usr/bin/env python3
"""What DRY and bad words make of token sequences, by other people's arithmetic.

    python3 -m venv /tmp/v && /tmp/v/bin/pip install transformers==5.24.0 torch==2.15.0
    /tmp/v/bin/python make_history_fixtures.py

DRY is its author's description (text-generation-webui, pull request 5677) taken by the word, slow
and plain: for every token that came before, the stretch in front of it is compared with the end of
the sequence, from the last token back, until they differ or a breaker is met; if at least
`allowed_length` tokens agree, the token is penalised by
`multiplier * base ** (agreeing - allowed_length)`, by its longest stretch. Bad words are
transformers' `NoBadWordsLogitsProcessor`.

Writes `data/history.json`.
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

OUT = Path(__file__).parent / "data" / "history.json"
SEED, NUM_CASES = 20261130, 120
EOS = 90


def agreeing(tokens, place, breakers):
    """How many tokens in front of `place` are those at the end, with no breaker among them."""
    count = 0
    while count < place and tokens[place - 1 - count] == tokens[len(tokens) - 1 - count]:
        if tokens[len(tokens) - 1 - count] in breakers:
            break
        count += 1
    return count


def dry(tokens, breakers, multiplier, base, allowed_length, last_n):
    tokens = tokens[-last_n:] if last_n else tokens
    longest = {}
    for place in range(1, len(tokens)):
        count = agreeing(tokens, place, breakers)
        if count >= allowed_length:
            longest[tokens[place]] = max(count, longest.get(tokens[place], 0))
    return {token: multiplier * base ** (count - allowed_length)
            for token, count in longest.items()}


def banned(tokens, words):
    processor = NoBadWordsLogitsProcessor(words, eos_token_id=EOS)
    scores = processor(torch.tensor([tokens]), torch.zeros(1, 100))
    return [token for token in range(100) if scores[0, token] == -torch.inf]


def main():
    random, cases = np.random.default_rng(SEED), []
    for _ in range(NUM_CASES):
        num_letters = int(random.integers(1, 6))
        tokens = random.integers(0, num_letters, random.integers(1, 60)).tolist()
        breakers = sorted({int(x) for x in random.integers(0, 12, random.integers(0, 3))})
        rule = {"multiplier": round(random.uniform(0.1, 3), 2),
                "base": round(random.uniform(1, 2.5), 2),
                "allowed_length": int(random.integers(1, 5)),
                "last_n": int(random.choice([0, 0, 5, 20, 200]))}
        words = {tuple(random.integers(0, num_letters, random.integers(1, 4)).tolist())
                 for _ in range(3)}
        words = [list(word) for word in sorted(words)]
        penalties = sorted(dry(tokens, breakers, **rule).items())
        cases.append({"tokens": tokens, "breakers": breakers, "rule": rule, "penalties": penalties,
                      "words": words, "banned": banned(tokens, words)})
    assert sum(bool(case["penalties"]) for case in cases) > NUM_CASES // 3
    OUT.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
