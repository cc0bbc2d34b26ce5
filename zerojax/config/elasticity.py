"""Elastic batches: a batch size that many numbers of devices can divide.

Arithmetic only; imports no JAX.

The arithmetic is DeepSpeed's (`deepspeed/elasticity/elasticity.py`, version 0.1 and, for devices
that join and leave in whole nodes, 0.2), so that a run started there continues here with the same
batch. Candidates are each micro-batch size, and their least common multiple, times the largest
highly composite number that stays below the limit; the candidate that most numbers of devices can
divide is chosen.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from zerojax.config.checks import check_size, names_keywords, refuse
from zerojax.config.loader import ConfigError, coerce_fields

_MAX_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class ElasticBatch:
    """Batch of an elastic run.

    Attributes:
      global_batch_size: rows of a step, on every number of devices.
      device_counts: the numbers of devices that can divide it, smallest first.
      devices_per_shard: devices that share the rows of one data shard (context x stage x model).
      micro_batch_sizes: allowed numbers of rows of a data shard per forward pass.
    """

    global_batch_size: int
    device_counts: tuple[int, ...]
    devices_per_shard: int
    micro_batch_sizes: tuple[int, ...]

    def micro_batch_size(self, num_devices: int) -> int:
        """Returns the rows of a data shard per forward pass: the largest size that divides its
        rows.

        Raises:
          ConfigError: this number of devices cannot divide the batch; names the nearest that can.
        """
        if num_devices not in self.device_counts:
            shown = ", ".join(map(str, self.device_counts[:_MAX_SHOWN]))
            more = len(self.device_counts) - _MAX_SHOWN
            nearest = min(self.device_counts, key=lambda count: abs(count - num_devices))
            raise ConfigError(
                f"{num_devices} devices cannot divide the elastic batch of "
                f"{self.global_batch_size} rows into micro-batches of "
                f"{' or '.join(map(str, self.micro_batch_sizes))}; use {nearest}, or one of "
                f"{shown}{f' and {more} more' if more > 0 else ''}",
                ("elasticity",),
            )
        rows = self.global_batch_size * self.devices_per_shard // num_devices
        return max(size for size in self.micro_batch_sizes if rows % size == 0)

    def num_microbatches(self, num_devices: int) -> int:
        """Returns the number of microbatches of every data shard.

        Raises:
          ConfigError: see `micro_batch_size`.
        """
        size = self.micro_batch_size(num_devices)
        return self.global_batch_size * self.devices_per_shard // (num_devices * size)


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class ElasticityConfig:
    """One global batch for many numbers of devices. The defaults are DeepSpeed's.

    The batch is chosen once, from these settings only; its division into microbatches follows from
    the available devices. So losses are equal for all numbers of devices, up to rounding.
    """

    enabled: bool = False
    """true: this section sets global_batch_size and num_microbatches."""
    max_global_batch_size: int = 2000
    """Rows. The batch is the largest below this limit that many numbers of devices can divide."""
    micro_batch_sizes: tuple[int, ...] = (2, 4, 6)
    """Rows of a data shard that fit into memory in one pass."""
    min_devices: int = 1
    """Fewest devices of the run."""
    max_devices: int = 10_000
    """Most devices of the run."""
    devices_per_node: int | None = None
    """Devices join and leave in whole nodes of this size. null: one by one."""
    prefer_larger_batch: bool = True
    """If equally many numbers of devices divide two batch sizes, take the larger one."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_size(self, "max_global_batch_size", "min_devices", "devices_per_node")
        if self.max_devices < self.min_devices:
            refuse(
                "max_devices",
                self.max_devices,
                f"is below min_devices ({self.min_devices}); raise it",
            )
        sizes = self.micro_batch_sizes
        if not sizes or min(sizes) < 1:
            refuse("micro_batch_sizes", sizes, "must be a list of integers >= 1, such as [2, 4]")
        if max(sizes) > self.max_global_batch_size:
            refuse(
                "micro_batch_sizes",
                sizes,
                f"has a size above max_global_batch_size ({self.max_global_batch_size}); "
                "use smaller sizes",
            )

    def choose_batch(self, devices_per_shard: int = 1) -> ElasticBatch:
        """Returns the batch, with the numbers of devices that can divide it.

        Args:
          devices_per_shard: devices that share the rows of a data shard (context x stage x model).

        Raises:
          ConfigError: nodes that data shards do not divide, or no number of devices within the
            limits.
        """
        # The unit that joins and leaves: a node, or the devices of one data shard.
        unit = self.devices_per_node or devices_per_shard
        if unit % devices_per_shard:
            raise ConfigError(
                f"{unit} is not divisible by context x stage x model ({devices_per_shard}), so a "
                f"data shard would be on two nodes; use a multiple of {devices_per_shard}",
                ("elasticity", "devices_per_node"),
            )
        shards = unit // devices_per_shard
        limits = -(-self.min_devices // unit), self.max_devices // unit
        largest = self.max_global_batch_size // shards
        sizes = tuple(sorted(set(self.micro_batch_sizes)))
        if limits[0] > limits[1] or sizes[-1] > largest:
            raise ConfigError(
                f"no number of devices from {self.min_devices} to {self.max_devices}, in steps of "
                f"{unit}, can divide a batch of at most {self.max_global_batch_size} rows into "
                f"micro-batches of {' or '.join(map(str, sizes))}; raise max_devices or "
                "max_global_batch_size",
                ("elasticity",),
            )
        batch, counts = _best(largest, sizes, limits, self.prefer_larger_batch)
        if not counts:
            raise ConfigError(
                f"no number of devices from {self.min_devices} to {self.max_devices} divides any "
                f"batch of at most {self.max_global_batch_size} rows; lower min_devices, or raise "
                "max_devices",
                ("elasticity",),
            )
        return ElasticBatch(
            global_batch_size=batch * shards,
            device_counts=tuple(count * unit for count in counts),
            devices_per_shard=devices_per_shard,
            micro_batch_sizes=sizes,
        )


def _best(
    largest: int, sizes: tuple[int, ...], limits: tuple[int, int], prefer_larger: bool
) -> tuple[int, tuple[int, ...]]:
    """Returns (batch, numbers of units) of the candidate batch that most numbers of units can
    divide; a unit is a node or a data shard."""
    bases = {base for base in (*sizes, math.lcm(*sizes)) if base <= largest}
    candidates = {base * _highly_composite(largest // base) for base in bases}
    found = [(batch, _counts(batch, sizes, limits)) for batch in candidates]
    sign = 1 if prefer_larger else -1
    return max(found, key=lambda one: (len(one[1]), sign * one[0]))


def _counts(batch: int, sizes: tuple[int, ...], limits: tuple[int, int]) -> tuple[int, ...]:
    """Returns the numbers of units (nodes or data shards), within `limits`, whose shares of a batch
    are whole micro-batches."""
    whole = {n for size in sizes if batch % size == 0 for n in _divisors(batch // size)}
    return tuple(sorted(n for n in whole if limits[0] <= n <= limits[1]))


def _divisors(number: int) -> Iterator[int]:
    for low in range(1, math.isqrt(number) + 1):
        if number % low == 0:
            yield low
            yield number // low


@functools.cache
def _highly_composite(limit: int) -> int:
    """Returns the largest number up to `limit` (>= 1) with more divisors than any smaller one.

    Such a number is a product of the first primes with non-increasing exponents.
    """
    best = (1, 1)  # divisors, number
    for number, divisors in _falling_products(1, 1, 64, limit, (2, 3, 5, 7, 11, 13, 17, 19, 23)):
        if divisors > best[0] or (divisors == best[0] and number < best[1]):
            best = divisors, number
    return best[1]


def _falling_products(
    number: int, divisors: int, exponent: int, limit: int, primes: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    """Yields (number, count of its divisors) of all products of `primes` up to a limit with
    non-increasing exponents."""
    yield number, divisors
    if not primes:
        return
    for power in range(1, exponent + 1):
        number *= primes[0]
        if number > limit:
            return
        yield from _falling_products(number, divisors * (power + 1), power, limit, primes[1:])
