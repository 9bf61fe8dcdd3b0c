"""What errors have to be: one sentence."""


def sentence(error):
    """The text of what `pytest.raises` caught, which is a single line."""
    text = str(error.value)
    assert "\n" not in text
    return text
