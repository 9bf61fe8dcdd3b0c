import torch
from recorders import recorder_of
from rules import check_rule

from batchnorm.lab.claims import repair
from batchnorm.lab.networks.chain import Chain


def results_of(kind):
    after = {"confirmed": [0.95] * 5, "refuted": [0.55] * 5, "inconclusive": [0.55, 0.6, 0.8, 0.9, 0.9]}[kind]
    ends = [0.97] * len(repair.SHARES)

    def curve(middle):
        return [middle if share == 0.5 else end for share, end in zip(repair.SHARES, ends, strict=True)]

    return [{"seeds": [{way: curve(a if "matched, " in way else 0.5) for way in repair.WAYS} for a in after]}]


def test_the_rule_gives_every_verdict():
    check_rule(repair.CLAIM, results_of)


def test_no_loss_is_nothing_to_repair():
    (result,) = results_of("confirmed")
    for seed in result["seeds"]:
        seed["matched"] = [0.97] * len(repair.SHARES)
    assert repair.judge([repair.Part({}, result)]).outcome == "refuted"


def test_units_in_another_order_are_found_again():
    shape = {"inputs": 6, "classes": 3, "widths": (9, 8)}
    first = Chain(1, **shape)
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    first.train()(x)
    mixed = Chain(2, **shape)
    state = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    for layer, width in enumerate(shape["widths"]):
        order = torch.randperm(width, generator=torch.Generator().manual_seed(layer))
        for name in [n for n in state if n.startswith((f"norms.{layer}.", f"linears.{layer}.")) and state[n].dim()]:
            state[name] = state[name][order]
        after = "read_out.weight" if layer else "linears.1.weight"
        state[after] = state[after][:, order]
    mixed.load_state_dict(state)
    torch.testing.assert_close(mixed.eval()(x), first.eval()(x))
    found = repair.matched(first, mixed, x)
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, msg=name)


def test_the_ends_of_the_line_are_the_two_networks(tmp_path):
    options = {"data": "digits", "widths": [16], "steps": 20, "seeds": 1}
    (seed,) = repair.measure(options, recorder_of(tmp_path))["seeds"]
    assert seed["matched"][0] == seed["averaged as they are"][0]
    assert abs(seed["matched"][-1] - seed["averaged as they are"][-1]) < 0.01  # rounding
    assert seed["matched"][0] > 0.3
