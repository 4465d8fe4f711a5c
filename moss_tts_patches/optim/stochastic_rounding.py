"""Rounds float32 to bfloat16 at random, so that small updates are kept on average instead of lost.

A bfloat16 weight of 0.02 has neighbours 1.2e-4 apart. An update of 1e-5 is nearly always rounded away; rounded up with
probability 0.08 instead, a hundred of them move the weight by what they add up to.

The randomness is a *function* of (seed, step, parameter name, element), by a counter-based generator. There is no state
to save or to share: a resumed run rounds like the uninterrupted one, ranks agree, slices and order do not matter, and
no generator that upstream draws its data order from is touched.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011 (Philox4x32-10).
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import torch

ELEMENTS_PER_CALL = 8  # one Philox call gives 128 bits, an element takes 16: what bfloat16 drops of a float32
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Round = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class RoundingNoise:
    """The stream of one parameter in one step, as Philox words.

    The counter is (element // 8 low word, its high word, step, name low word), the key is (seed low word, seed high
    word xor name high word), where *name* is a 64-bit hash of the parameter's name.
    """

    key: tuple[int, int]
    step_word: int
    name_word: int
    device: torch.device

    @classmethod
    def of(cls, seed: int, step: int, name: str, device: torch.device) -> RoundingNoise:
        """Makes the stream.

        Args:
            seed: of the run, below 2**64.
            step: the parameter's step count.
            name: the parameter's name.
            device: where the noise will be made.
        """
        digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        key = (seed & _WORD, (seed >> 32 & _WORD) ^ digest >> 32)
        return cls(key, step & _WORD, digest & _WORD, device)

    @functools.cached_property
    def rounds(self) -> list[Round]:
        """The constants on the device, made once for all slices: on CUDA each time is a synchronous copy."""
        return round_constants(self.key, self.device)


def philox_4x32(even: torch.Tensor, odd: torch.Tensor, rounds: list[Round]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten rounds of Philox, on two rows at a time.

    The work is arranged for few operations: the two 32 x 32 bit products of a round are one int64 multiplication
    (which wraps, as it should), the crossing of the halves is one flip, and the rows trade places every round instead
    of being put back. Bits above 32 are cleared once a round, before they could reach a product's high half.

    Args:
        even: ``[2, n]`` int64, counter words 0 and 2; overwritten.
        odd: ``[2, n]`` int64, counter words 1 and 3.
        rounds: of :func:`round_constants`.

    Returns:
        Output words 0 and 2, and 1 and 3, each ``[2, n]`` int64; bits above 32 are undefined in the second.
    """
    for multipliers, key in rounds:
        product = even.mul_(multipliers)
        even = (product >> 32).bitwise_xor_(odd.flip(0)).bitwise_xor_(key).bitwise_and_(_WORD)
        odd = product
    return even, odd


def round_constants(key: tuple[int, int], device: torch.device | str) -> list[Round]:
    """Returns ``(multipliers [2, 1], key [2, 1])`` int64 for every round, in the order that the rows have in it."""
    first, second = _MULTIPLIERS
    rows = [[first, second], [second, first]]
    for number in range(_ROUNDS):
        low, high = ((word + number * step) & _WORD for word, step in zip(key, _KEY_STEPS))
        # In even rounds word 0 is in front and what comes out in front is the next word 2, which takes the high key.
        rows.append([high, low] if number % 2 == 0 else [low, high])
    parts = torch.tensor(rows, dtype=torch.int64, device=device).unsqueeze(2).unbind(0)
    return [(parts[number % 2], parts[2 + number]) for number in range(_ROUNDS)]


def rounding_bits(noise: RoundingNoise, first_element: int, count: int) -> torch.Tensor:
    """Returns 16 random bits for each of ``count`` elements of a parameter.

    Args:
        noise: the stream.
        first_element: index of the first one in the flattened parameter; any size, 64 bits are used.
        count: how many.

    Returns:
        ``[count]`` int32, 0 to 65535.
    """
    first_call, lead = divmod(first_element, ELEMENTS_PER_CALL)
    calls = -(-(lead + count) // ELEMENTS_PER_CALL)
    index = torch.arange(first_call, first_call + calls, dtype=torch.int64, device=noise.device)
    even = torch.stack((index & _WORD, torch.full_like(index, noise.step_word)))
    odd = torch.stack((index >> 32, torch.full_like(index, noise.name_word)))
    even, odd = philox_4x32(even, odd, noise.rounds)
    # [parity, pair, call] -> [call, pair, parity]: words 0 1 2 3 of each call, then their low and high halves.
    words = torch.stack((even, odd)).permute(2, 1, 0).to(torch.int32, memory_format=torch.contiguous_format)
    halves = words.view(torch.int16).view(-1)
    return halves[lead : lead + count].to(torch.int32).bitwise_and_(0xFFFF)


def stochastic_round_bf16(values: torch.Tensor, seed: int, step: int, name: str, first_element: int) -> torch.Tensor:
    """Rounds to one of the two neighbours, to each with the probability that makes the mean exact.

    Nan and infinities pass through. A finite value beyond the largest bfloat16 (3.39e38) may become infinite, as it
    may with rounding to nearest.

    Args:
        values: float32, any shape, contiguous.
        seed: of the run.
        step: the parameter's step count.
        name: the parameter's name.
        first_element: index of ``values``' first element in the flattened parameter.

    Returns:
        bfloat16, the shape of ``values``.
    """
    noise = RoundingNoise.of(seed, step, name, values.device)
    return round_with(values.view(-1), noise, first_element).view(values.shape)


def round_with(values: torch.Tensor, noise: RoundingNoise, first_element: int) -> torch.Tensor:
    """Does the work of :func:`stochastic_round_bf16` with a stream that is made already; ``values [n]`` float32.

    Adding the noise to the bits that bfloat16 drops carries into those it keeps with the right probability, for both
    signs, because floating-point numbers are ordered like their magnitude bits.
    """
    bits = rounding_bits(noise, first_element, values.numel())
    bits.add_(values.view(torch.int32)).bitwise_and_(-0x10000)
    return torch.where(values.isnan(), values, bits.view(torch.float32)).to(torch.bfloat16)
