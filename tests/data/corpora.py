"""Texts."""


def words(rng, documents, longest=60):
    """Documents of words, some beyond ASCII; no two are the same."""
    lexicon = ["the", "cat", "sat", "größer", "→", "naïve", "\n", "0", "def", "return", "日本"]
    return [f"{index} " + " ".join(rng.choice(lexicon, size=rng.integers(1, longest))) for index in range(documents)]
