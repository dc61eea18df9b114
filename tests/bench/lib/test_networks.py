import pytest

from bench.lib.networks import NETWORKS

PUBLISHED = {  # parameters, and gradient tensors where a paper or the reference implementation states them
    "vgg16": (138_357_544, 32),
    "vgg19": (143_667_240, 38),
    "resnet50": (25_557_032, 161),
    "resnet101": (44_549_160, 314),
    "resnet152": (60_192_808, 467),
    "densenet169": (14_149_480, 508),
    "densenet201": (20_013_928, 604),
    "inception_v4": (42_679_816, 449),
    "xception": (22_855_952, None),
    "bert_base": (110_106_428, 206),
    "bert_large": (336_226_108, None),
    "gpt2": (124_439_808, 148),
    "gpt2_medium": (354_823_168, 292),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_construction_rules_give_the_published_number_of_parameters(name):
    parameters = NETWORKS[name]()
    total, tensors = PUBLISHED[name]
    assert sum(parameter.numel for parameter in parameters) == total
    assert tensors in (None, len(parameters))


@pytest.mark.parametrize(
    ("name", "published_gmacs"), [("vgg16", 15.5), ("resnet50", 4.1), ("resnet152", 11.5), ("densenet201", 4.3)]
)
def test_multiply_adds_of_convolutions_and_linear_layers_are_the_published_ones(name, published_gmacs):
    weights = [p for p in NETWORKS[name]() if not any(norm in p.name for norm in (".bn.", "norm"))]
    assert sum(parameter.macs for parameter in weights) / 1e9 == pytest.approx(published_gmacs, rel=0.03)


@pytest.mark.parametrize("name", NETWORKS)
def test_names_are_unique(name):
    names = [parameter.name for parameter in NETWORKS[name]()]
    assert len(set(names)) == len(names)
