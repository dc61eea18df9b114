from fakes import memories


def test_modules_of_two_models_have_different_keys() -> None:
    outermost, block = memories.modules(1)
    assert (outermost.key, block.key) == ((0, ""), (0, "blocks.0"))
