import pytest
import torch
from made_up import around, contest
from rules import check_rule
from silent import Silent
from torch import nn

from batchnorm.lab.claims import transformer
from batchnorm.lab.data.text import CHARACTERS, generated, sentences
from batchnorm.lab.networks.transformer import Transformer


def results_of(kind):
    batch = {"confirmed": around(0.5), "refuted": around(0.7), "inconclusive": around(0.6)}[kind]
    by_arm = {"layer norm": around(0.6), "batch norm": batch, "RMS norm": around(0.6), "DyT": around(0.5)}
    return [contest(*values) for values in by_arm.values()]


def test_the_rule_gives_every_verdict():
    check_rule(transformer.CLAIM, results_of)


@pytest.mark.parametrize("norm", ["layer", "rms", "dyt", "batch"])
def test_no_place_sees_later_ones_except_through_the_statistics_of_batches(norm):
    network = Transformer(0, norm=norm, characters=19, length=8)
    x = torch.randint(0, 19, (4, 8), generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[:, 5:] = (other[:, 5:] + 3) % 19
    with torch.no_grad():
        assert torch.allclose(network.eval()(x)[:, :5], network(other)[:, :5], atol=1e-6)
        network.train()
        leaks = not torch.allclose(network(x)[:, :5], network(other)[:, :5], atol=1e-4)
    assert leaks == (norm == "batch")


def test_a_head_is_torchs_attention():
    network = Transformer(0, norm="layer", characters=5, length=6, width=8, blocks=1, heads=2)
    torchs = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    with torch.no_grad():
        torchs.in_proj_weight.copy_(network.mixing[0])
        torchs.out_proj.weight.copy_(network.joining[0])
        h = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1))
        expected, _ = torchs(h, h, h, attn_mask=torch.ones(6, 6, dtype=torch.bool).triu(1))
        assert torch.allclose(network.attention(0, h), expected, atol=1e-6)


def test_the_text_is_true():
    text = generated(3000, seed=4)
    assert set(text) <= set(CHARACTERS)
    closing = {")": "(", "]": "[", ">": "<"}
    for item in text.split(";")[:-1]:  # the last one is cut
        if "+" in item:
            left, value = item.split("=")
            assert sum(map(int, left.split("+"))) % 10 == int(value)
        open_ones = []
        for character in item:
            if character in closing.values():
                open_ones.append(character)
            elif character in closing:
                assert open_ones.pop() == closing[character]
        assert not open_ones


def test_what_rates_are_chosen_on_is_another_text():
    data, tuning = sentences(400, 8), sentences(400, 8, held_out=True)
    assert torch.equal(data.train_inputs, tuning.train_inputs)
    assert not torch.equal(data.validation_inputs, tuning.validation_inputs)
    assert torch.equal(data.train_inputs[:, 1:], data.train_labels[:, :-1])


def test_an_arm_is_measured_over_all_places():
    options = {"arm": "batch norm", "characters": 400, "length": 8, "width": 4, "blocks": 1, "steps": 2, "seeds": 1}
    found = transformer.measure(options, Silent())
    assert len(found["sweep"]) == 3
    assert 0 <= found["accuracies"][0] <= 1
