"""Stochastic rounding: the generator against published vectors, and noise that depends on nothing but its arguments."""

from __future__ import annotations

import hashlib
import itertools

import pytest
import torch

from moss_tts_patches.optim.stochastic_rounding import (
    RoundingNoise,
    philox_4x32,
    round_constants,
    rounding_bits,
    stochastic_round_bf16,
)

# Random123 1.14.0, tests/kat_vectors, lines "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
CPU = torch.device("cpu")


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """The generator with Python integers, one counter at a time: independent of the tensor code."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (p1 >> 32) ^ b ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ d ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


def scalar_bits(seed: int, step: int, name: str, element: int) -> int:
    """16 bits of one element, as the format is documented."""
    digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    call, lane = element // 8, element % 8
    counter = [call & 0xFFFFFFFF, call >> 32, step, digest & 0xFFFFFFFF]
    word = scalar_philox(counter, [seed & 0xFFFFFFFF, (seed >> 32) ^ (digest >> 32)])[lane // 2]
    return word >> 16 if lane % 2 else word & 0xFFFF


@pytest.mark.parametrize("counter, key, result", KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, result):
    assert scalar_philox(words(counter), words(key)) == words(result)
    first = torch.tensor(words(counter)).view(2, 2)
    even, odd = first[:, :1].repeat(1, 3), first[:, 1:].repeat(1, 3)
    even, odd = philox_4x32(even, odd, round_constants(tuple(words(key)), CPU))
    for column in range(3):
        found = [int(even[0, column]), int(odd[0, column]), int(even[1, column]), int(odd[1, column])]
        assert [word & 0xFFFFFFFF for word in found] == words(result)


@pytest.mark.parametrize("first_element", [0, 5, 2**31 - 4, 2**31 + 3, 2**35 - 3, 2**35 + 11, 2**40 + 1])
def test_bits_follow_the_documented_counter_at_every_offset(first_element):
    seed, step, name = 2**63 + 12345, 77, "transformer.layers.0.weight"
    bits = rounding_bits(RoundingNoise.of(seed, step, name, CPU), first_element, 21)
    assert bits.dtype == torch.int32
    assert bits.tolist() == [scalar_bits(seed, step, name, first_element + index) for index in range(21)]


def test_noise_differs_where_any_argument_does():
    def bits(seed=1, step=1, name="a", first_element=0):
        return rounding_bits(RoundingNoise.of(seed, step, name, CPU), first_element, 64)

    others = [bits(seed=2), bits(seed=1 + 2**32), bits(step=2), bits(name="b"), bits(first_element=64)]
    others += [bits(first_element=2**35), bits(first_element=2**31)]
    assert torch.equal(bits(), bits())
    for other in others:
        assert (other == bits()).float().mean() < 0.1


def test_rounding_does_not_depend_on_slices_or_order():
    values = torch.randn(5000) * 0.02
    whole = stochastic_round_bf16(values, 3, 9, "w", 2**33 + 1)
    parts = {}
    cuts = [0, 1, 9, 256, 263, 1031, 4999, 5000]
    for start, end in reversed(list(itertools.pairwise(cuts))):
        parts[start] = stochastic_round_bf16(values[start:end], 3, 9, "w", 2**33 + 1 + start)
    assert torch.equal(whole, torch.cat([parts[start] for start in cuts[:-1]]))
    assert not torch.equal(whole, stochastic_round_bf16(values, 3, 9, "w", 2**33))


def test_no_global_generator_is_touched():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = stochastic_round_bf16(torch.full((1000,), 0.0201), 3, 9, "w", 0)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    assert torch.equal(first, stochastic_round_bf16(torch.full((1000,), 0.0201), 3, 9, "w", 0))


@pytest.mark.parametrize("value", [0.0201, -0.0201, 1.0000001, -3e-39])
def test_rounding_goes_to_a_neighbour_and_is_right_on_average(value):
    count = 2**18
    exact = torch.full((count,), value)
    rounded = stochastic_round_bf16(exact, 1, 1, "w", 0).double()
    step = exact[:1].view(torch.int32) & -0x10000
    low, high = (bits.view(torch.float32).double() for bits in (step, step + 0x10000))
    assert ((rounded == low) | (rounded == high)).all()
    gap = (high - low).abs().item()
    # A mean of `count` draws that are 0 or 1 gap has a standard error of at most gap / 2 / sqrt(count); five of them.
    assert abs(rounded.mean().item() - exact[0].double().item()) <= 2.5 * gap / count**0.5
    nearest = exact.bfloat16().double().mean().item()
    if value == 0.0201:  # the negative control: to nearest, the mean is off by a third of a gap
        assert abs(nearest - exact[0].double().item()) > 2.5 * gap / count**0.5


def test_what_is_representable_stays_and_what_is_not_finite_passes():
    kept = torch.randn(4096).bfloat16()
    assert torch.equal(stochastic_round_bf16(kept.float(), 1, 1, "w", 0), kept)
    quiet = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0]), quiet]).repeat(64)
    rounded = stochastic_round_bf16(values, 1, 1, "w", 0)
    assert torch.equal(rounded.float().nan_to_num(7.0), values.nan_to_num(7.0))
    assert torch.equal(rounded.isnan(), values.isnan()) and torch.equal(rounded.signbit()[3:5], values.signbit()[3:5])


def test_shape_is_kept():
    assert stochastic_round_bf16(torch.ones(3, 4, 5), 1, 1, "w", 0).shape == (3, 4, 5)
