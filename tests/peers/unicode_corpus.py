# SPDX-License-Identifier: Apache-2.0
"""Text that finds mistakes in tokenizers: many scripts, and what lies between the words.

Only characters of Unicode 13 and older are used, so that libraries with different tables agree on what they are.
"""
import unicodedata

WORDS = """the of and to in is that it was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then them
these so some her would make like him into time has look two more write go see number no way could people my than first
water been call who oil its now find long down day did get come made may part attention is a reduction along the tree
Don't I'll we've you're it's they'd I'm DON'T WE'VE 'tis rock'n'roll internationalization antidisestablishmentarianism
def return import class while lambda std::vector<int> x_1 foo(bar)[0] != == && || ++i; /* comment */ #include <cmath>
Größe straße naïve café déjà über ångström señor garçon İstanbul ığdır fußball
привет мир это проверка длинное предложение ёлка Київ Ђорђе καλημέρα κόσμε Ἀθήνα שלום עולם שָׁלוֹם مرحبا بالعالم
السَّلامُ नमस्ते दुनिया क्षत्रिय বাংলা தமிழ் తెలుగు ไทยภาษา ລາວ မြန်မာ ខ្មែរ ქართული Հայերեն አማርኛ ᏣᎳᎩ
你好世界 注意力机制 こんにちは カタカナ ｶﾀｶﾅ 한국어 안녕하세요 ᄒᆞᆫ 𠀀𠀁 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈𐌰 ﬁne ﬂow ǅ ǆ""".split()
NUMBERS = ["0", "7", "42", "123", "1234", "12345678901234567890", "3.14159", "1,000,000", "-273.15", "0x1F", "1e-9", "٣٤٥٦",
           "१२३४", "²³¹", "½", "Ⅻ", "①②③④", "௧௨௩", "𝟘𝟙𝟚𝟛", "10%", "$9.99", "€5"]
MARKS = ["!", "?", "...", "…", "—", "“quoted”", "«да»", "¿Qué?", "。", "、", "!!!???", "----", "====\n", "@#$%^&*", "<|>", "→",
         "∑∫√", "©®™", "\u200b", "\u200d", "\ufeff", "\u00ad", "\u180e", "\u2060", "'", "''", "'s", "'S", "'ſ", "'T", "'Re",
         "'VE", "'LL", "'K", "’s", "´s"]
EMOJI = ["😀", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "❤️", "1️⃣", "🧑🏿‍🚀", "🫠"[:0], "☃", "🤷🏼‍♀️"]
COMBINING = ["e\u0301", "a\u0308\u0323", "Z\u0351\u036b\u0343\u036a\u0302\u0346", "\u0301", " \u0301x", "n\u0303", "क\u094d\u0937"]
SPACES = [" ", "  ", "   ", " " * 7, "\t", "\t\t", "\n", "\n\n", "\r\n", "\r\n\r\n", "\r", " \n", "\n ", "  \n  \n", "\u00a0", "\u3000",
          "\u2003", "\u2028", "\u2029", "\u0085", "\u1680", "\u202f", "\x0b", "\x0c", " \t\n\r", "\x1c", "\x1f", "\x00", "\x7f", "\x1b[0m",
          "\u0001"]


def assigned(code):
    return (code < 0xD800 or code > 0xDFFF) and unicodedata.category(chr(code)) not in ("Cn", "Cs")


def old(code):
    """Whether the character has been there, and the same, since Unicode 3.2."""
    return assigned(code) and unicodedata.ucd_3_2_0.category(chr(code)) == unicodedata.category(chr(code))


def random_character(rng):
    while True:
        code = rng.choice([rng.randrange(0x80), rng.randrange(0x800), rng.randrange(0x10000), rng.randrange(0x110000)])
        if old(code):
            return chr(code)


def random_bytes_made_valid(rng, count):
    return bytes(rng.randrange(256) for _ in range(count)).decode("utf-8", errors="replace")


def piece(rng):
    kind = rng.random()
    if kind < 0.40:
        word = rng.choice(WORDS)
        return rng.choice([word, word, word.upper(), word.capitalize()])
    if kind < 0.62:
        return rng.choice(SPACES[:8] if rng.random() < 0.6 else SPACES)
    for limit, kinds in ((0.70, NUMBERS), (0.80, MARKS), (0.86, EMOJI), (0.91, COMBINING)):
        if kind < limit:
            return rng.choice(kinds)
    if kind < 0.95:
        return "".join(random_character(rng) for _ in range(rng.randint(1, 6)))
    if kind < 0.97:
        return random_bytes_made_valid(rng, rng.randint(1, 12))
    if kind < 0.985:
        return rng.choice([" ", "\n", "a", "9", ".", "é"]) * rng.randint(2, 60)
    return str(rng.randrange(10 ** rng.randint(1, 30)))


def text(rng, pieces):
    return "".join(piece(rng) for _ in range(pieces))


def sentence(rng, words):
    return " ".join(rng.choice(WORDS) for _ in range(words)) + rng.choice([".", "!\n", "\n\n", ".\r\n"])


def training_corpus(rng, lines):
    return [sentence(rng, rng.randint(3, 15)) if rng.random() < 0.7 else text(rng, 20) for _ in range(lines)]
