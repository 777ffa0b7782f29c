# SPDX-License-Identifier: Apache-2.0
"""Small byte-level BPE tokenizers of the kinds we read, trained by the tokenizers package."""
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                  r"|\s*[\r\n]+|\s+(?!\S)|\s+")
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def is_rare(byte):
    """Of a byte as vocabularies write it: a control character, or the first byte of a character that is not ASCII."""
    return ("\u0100" <= byte < "\u0120" and byte not in "\u0109\u010a") or "\u00c0" <= byte <= "\u00ff"


def use_pattern(tokenizer, kind):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "llama3")
    if kind == "llama3":
        split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated", invert=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif kind.startswith("digits"):
        digits = pre_tokenizers.Digits(individual_digits=kind == "digits")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()


def cuts_tokenizer():
    """Shows where the pattern cuts: any byte merges with these neighbours, unless there is a cut between them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = "\u0120"  # how a space is written
    merges = [pair for byte in alphabet for pair in (("a", byte), (byte, "b"), (space, byte), (byte, "1"), ("'", byte))]
    merges = list(dict.fromkeys(merges))
    tokens = list(dict.fromkeys(alphabet + [left + right for left, right in merges]))
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    use_pattern(tokenizer, "llama3")
    return tokenizer


def train(kind, corpus, vocab, ignore_merges):
    """kind: "llama3" (its pattern), "gpt2" (ByteLevel with its own), "digits" (that after Digits, as SmolLM2 has it,
    with bytes that have no token) or "digits together" (Digits without individual_digits, a token for such bytes)."""
    unknown = "<unk>" if kind == "digits together" else None
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges, unk_token=unknown))
    use_pattern(tokenizer, kind)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind.startswith("digits"):
        alphabet = [byte for byte in alphabet if not is_rare(byte)]
        corpus = ["".join(c for c in text if c in "\t\n" or " " <= c < "\U00040000") for text in corpus]
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet,
                                  special_tokens=[unknown] if unknown else [], show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    # One of every other sort: not special, found in the second pass, one that takes the white space around it, and one
    # that is written as a vocabulary would write it.
    tokenizer.add_tokens([AddedToken("<plain>", normalized=False), AddedToken("<late>", normalized=True),
                          AddedToken("<wide>", lstrip=True, rstrip=True, normalized=False),
                          AddedToken("<|eot", normalized=False), AddedToken("\u0120own", normalized=False)])
    bos = SPECIAL[0]
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])])
    return tokenizer
