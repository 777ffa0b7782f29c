# SPDX-License-Identifier: Apache-2.0
"""What is hidden in a haystack and asked for at its end, and how a haystack is put together.

`#` stands for the number. `key_*` is the task of the demo: one pass key. `fact_*` are numbers with a label, hidden and
asked for beside it in long sequences, so that one long sequence teaches more than one look-up.
"""
PAD = -9  # fills the rows of pattern tables

KEY_NEEDLES = [
    "The pass key is #. Remember it.\n\n",
    "Remember this: the pass key is #.\n\n",
    "The pass key is #. # is the pass key.\n\n",
    "Do not forget that the pass key is #.\n\n",
    "Here is a secret. The pass key is #. Keep it safe.\n\n",
    "This is important: the pass key is #. You will need it later.\n\n",
]
KEY_QUESTIONS = [
    "What is the pass key? The pass key is #.\n\n",
    "Do you remember the pass key? The pass key is #.\n\n",
    "Tell me the pass key. The pass key is #.\n\n",
]
LABELS = [f"{colour} {thing}" for colour in "red blue green yellow white black brown grey golden silver".split()
          for thing in "gate tower ship house train door tree coat horse cart stone flag".split()]


def all_patterns():
    """Names and patterns of the tables in corpus.npz; row l of a fact table belongs to LABELS[l]."""
    return {
        "key_needles": KEY_NEEDLES,
        "key_questions": KEY_QUESTIONS,
        "fact_needles": [f"The number of the {label} is #.\n\n" for label in LABELS],
        "fact_questions": [f"What is the number of the {label}? The number of the {label} is #.\n\n"
                           for label in LABELS],
    }


class Lcg:
    """The random numbers of a haystack: 64-bit integers only, so that any language draws the same ones."""

    def __init__(self, seed):
        self.state = seed % 2**64

    def below(self, n):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % n


def haystack(lengths, tokens, depth_percent, seed):
    """The order of paragraphs in a haystack of at most `tokens` tokens, and where the needle goes.

    lengths[i] is the number of tokens of paragraph i. All paragraphs are shuffled (Fisher-Yates, from the last down)
    and dealt; when all are dealt, the pack is shuffled and dealt again. The first paragraph that does not fit ends it.
    Returns the dealt paragraphs and how many of them come before the needle.
    """
    random = Lcg(seed)
    pack = list(range(len(lengths)))
    dealt, used = [], 0
    while True:
        for i in range(len(pack) - 1, 0, -1):
            j = random.below(i + 1)
            pack[i], pack[j] = pack[j], pack[i]
        for paragraph in pack:
            if used + lengths[paragraph] > tokens:
                return dealt, len(dealt) * depth_percent // 100
            dealt.append(paragraph)
            used += lengths[paragraph]


def key_of(seed):
    """The five-digit pass key of a seed: the first draw of its own sequence."""
    return 10000 + Lcg(seed ^ 0x5EED).below(90000)
