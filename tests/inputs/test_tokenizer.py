import hashlib

import pytest

from cuajax.inputs.tokenizer import KEYS, SPECIAL, VERBS, CompactTokenizer, words


def test_structural_ids_are_pinned():
    t = CompactTokenizer()
    assert (t.pad_id, t.image_id, t.act_id) == (0, 1, 2)
    assert [t.id(v) for v in VERBS] == list(range(3, 14))
    assert (t.id("<key:enter>"), t.id("<key:ctrl+z>"), t.id("<space>")) == (14, 34, 35)
    assert (t.id("a"), t.id("z"), t.id("0"), t.id("9")) == (36, 61, 62, 71)
    assert (t.x0, t.y0) == (72, 88)
    assert [t.id("<x15>"), t.id("<y15>")] == [87, 103]


def test_words_only_grow_at_the_end():
    # A checkpoint's embedding rows are these words: appending is fine, anything else needs a new vocabulary.
    first = words()[:PINNED]
    assert hashlib.sha256(" ".join(first).encode()).hexdigest()[:16] == DIGEST


PINNED, DIGEST = 28, "4446c745df0bfd17"


def test_words_characters_case_and_punctuation():
    t = CompactTokenizer()
    assert t.encode("Press, RED (on)!") == t.encode("press red on") == [t.id("press"), t.id("red"), t.id("on")]
    assert t.encode("type 'qzx'") == [t.id("type"), t.id("q"), t.id("z"), t.id("x")]
    assert t.encode("42") == [t.id("4"), t.id("2")]
    assert t.encode("...  é\n") == []


def test_every_token_has_its_id_and_back():
    t = CompactTokenizer(bins=4)
    assert t.vocab_size == len(SPECIAL) + len(VERBS) + len(KEYS) + 1 + 36 + 8 + len([w for w in words() if len(w) > 1])
    assert [t.id(t.token(i)) for i in range(t.vocab_size)] == list(range(t.vocab_size))
    for bad in (-1, t.vocab_size):
        with pytest.raises(IndexError, match=str(bad)):
            t.token(bad)
    with pytest.raises(ValueError, match="bins is 0"):
        CompactTokenizer(bins=0)


def test_answers_of_encode_are_private():
    t = CompactTokenizer()
    t.encode("press").append(99)
    assert t.encode("press") == [t.id("press")]


def test_bins_inside_text():
    t = CompactTokenizer()
    assert t.encode("what <x5> <y9>") == [t.id("what"), t.id("<x5>"), t.id("<y9>")]
    assert t.encode("<x99> <image>") == t.encode("x 99 image")  # no text becomes a special token


@pytest.mark.parametrize("text", ["cat", "check red on", " red  ab c", "a b", "redcat", "red ", "ab red 7"])
def test_spelled_text_comes_back(text):
    t = CompactTokenizer()
    assert t.decode(t.spell(text)) == text
    assert len(t.spell("check red on")) == 3
    with pytest.raises(ValueError, match="no token for"):
        t.spell(text + "!")
