"""The kernel against the reference over shapes, strides, types, thread counts and variants chosen at random."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import ACTIVATIONS, KINKS, LAYOUTS, NATIVE, Case, Strides, path, threads, wrong

EXAMPLES = settings(max_examples=120, deadline=None, derandomize=True, database=None)


def strides(dims):
    return st.builds(
        Strides,
        st.permutations(range(dims)).map(tuple),
        st.tuples(*[st.integers(1, 3)] * dims),
        st.tuples(*[st.integers(0, 3)] * dims),
    )


@st.composite
def layouts(draw, dims, constant=True):
    names = [name for name in LAYOUTS if constant or name != "expanded"]
    return draw(st.one_of(st.sampled_from(names), strides(dims)))


@st.composite
def cases(draw):
    """Samples that fill a vector (others are torch's), of enough values that their variance is no accident."""
    batch = draw(st.integers(1, 20))
    channels = draw(st.integers(1, 70))
    sizes = draw(st.lists(st.integers(1, 9), max_size=3))
    positions = torch.Size(sizes).numel()
    while batch * positions < 4:
        batch += 1
    if channels * positions < 16:
        channels += -(-16 // positions)
    dims = 2 + len(sizes)
    activation = draw(st.sampled_from(ACTIVATIONS))
    return Case(
        (batch, channels, *sizes),
        draw(layouts(dims, constant=False)),
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
        activation,
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from(["both", "weight", "none"])),
        draw(layouts(dims, constant=not KINKS[activation])),
        eps=draw(st.sampled_from([1e-5, 1e-3, 0.1])),
        momentum=draw(st.floats(0, 1)),
        seed=draw(st.integers(0, 1000)),
    )


@EXAMPLES
@given(cases(), st.sampled_from([1, 2, 3, 5]), st.sampled_from(NATIVE))
def test_any_case(case, count, isa):
    with path(isa), threads(count):
        assert not wrong(case, isa)


@EXAMPLES
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 1500),
    st.integers(2, 6),
    st.sampled_from(ACTIVATIONS),
    st.booleans(),
    st.sampled_from(["contiguous", "channel_last"]),
    st.sampled_from(NATIVE),
)
def test_any_division_among_threads(batch, channels, positions, count, activation, residual, layout, isa):
    """More elements than one thread does alone, in up to 40 samples, channels and as many positions as that takes."""
    positions = min(max(positions, 16384 // (batch * channels) + 1), max(20, 40_000 // (batch * channels)))
    case = Case((batch, channels, positions), layout, activation=activation, residual=residual, seed=positions)
    with path(isa), threads(count):
        assert not wrong(case, isa)
