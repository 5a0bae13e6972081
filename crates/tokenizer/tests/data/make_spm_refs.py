"""Trains two tiny SentencePiece BPE models and writes their vocabularies and encodings.

Made with sentencepiece 0.2.3:
    python3 -m venv v && v/bin/pip install sentencepiece==0.2.3
    v/bin/python make_spm_refs.py        # writes spm_refs.json beside this file

The strings are those of smollm2_tokenizer_refs.json and a few more. `llama` has the settings of
Llama 2's vocabulary; `gemma` adds no space in front and has user-defined symbols and an unused
piece, which SentencePiece takes apart again after merging.
"""

import io
import json
import pathlib
import random

import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as proto

HERE = pathlib.Path(__file__).parent
WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which one you were all her she there would their we him been has when who will no "
    "more if out so up said what its about than into them can only other time new some could these "
    "token model batch engine stream cache block prompt naïve café über größer señor 日本 日本語 "
    "東京 привет мир 123 42 2024 don't it's foo_bar fn main let mut return"
).split()
TYPES = {"normal": 1, "unknown": 2, "control": 3, "user": 4, "unused": 5, "byte": 6}


def corpus():
    rng = random.Random(7)
    for _ in range(4000):
        line = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12)))
        yield line[0].upper() + line[1:] + rng.choice([".", "!", "?", ",", ":", ""])


def train(vocab_size, **options):
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=corpus(), model_writer=model, model_type="bpe", vocab_size=vocab_size,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        split_digits=True, character_coverage=0.999, minloglevel=2, **options)
    return model.getvalue()


def with_unused(model, pieces):
    message = proto.ModelProto()
    message.ParseFromString(model)
    assert pieces <= {piece.piece for piece in message.pieces}
    for piece in message.pieces:
        if piece.piece in pieces:
            assert piece.type == proto.ModelProto.SentencePiece.NORMAL
            piece.type = proto.ModelProto.SentencePiece.UNUSED
    return message.SerializeToString()


def kind(processor, index):
    if processor.is_unknown(index):
        return TYPES["unknown"]
    if processor.is_control(index):
        return TYPES["control"]
    if processor.is_unused(index):
        return TYPES["unused"]
    if processor.is_byte(index):
        return TYPES["byte"]
    return TYPES["normal"]


def describe(model, user_defined, texts):
    processor = spm.SentencePieceProcessor(model_proto=model)
    size = processor.get_piece_size()
    pieces = [processor.id_to_piece(i) for i in range(size)]
    types = [kind(processor, i) for i in range(size)]
    for i, piece in enumerate(pieces):
        if piece in user_defined:
            types[i] = TYPES["user"]
    encodings = []
    for text in texts:
        ids = processor.encode(text)
        encoding = {"text": text, "ids": ids}
        if processor.decode(ids) != text:
            encoding["decoded"] = processor.decode(ids)
        encodings.append(encoding)
    scores = [round(processor.get_score(i), 6) for i in range(size)]
    return {"pieces": pieces, "scores": scores, "types": types, "encodings": encodings}


def main():
    texts = [s["text"] for s in json.loads((HERE / "smollm2_tokenizer_refs.json").read_text())["strings"]]
    texts = [text for text in texts if len(text) < 500]
    texts += ["  the  token ", "▁the", "the▁token", "<s>the</s>", "<0x41>", "the<|user|>token",
              "<|user|>", "\t\n\r\n", "größer größer", "日本語東京", "streams streaming", "\u0301e"]
    user = ["<|user|>", "\n\n"]
    gemma = with_unused(train(420, add_dummy_prefix=False, user_defined_symbols=user),
                        {"▁the", "▁w", "ut", "th", "tre"})
    models = {
        "llama": {"add_space_prefix": True, **describe(train(480), [], texts)},
        "gemma": {"add_space_prefix": False, **describe(gemma, user, texts)},
    }
    out = {"made_by": f"sentencepiece {spm.__version__}, make_spm_refs.py", "models": models}
    text = json.dumps(out, ensure_ascii=False, separators=(",", ":"))
    (HERE / "spm_refs.json").write_text(text.replace('{"text"', '\n{"text"') + "\n")


main()
