"""Elastic batches: one batch size that many numbers of devices can divide.

This module only computes numbers and imports no JAX.

The arithmetic is DeepSpeed's (`deepspeed/elasticity/elasticity.py`: version 0.1, and version 0.2
for devices that join and leave in whole nodes). So a run that started in DeepSpeed continues here
with the same batch. The candidate batch sizes are each micro-batch size, and the least common
multiple of all micro-batch sizes, each multiplied by the largest highly composite number that keeps
the product below the limit. The candidate that the most numbers of devices can divide is chosen.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

from zerojax.config.checks import check_size, names_keywords, refuse
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import ConfigError, coerce_fields

_MAX_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class ElasticBatch:
    """Batch size of an elastic run, and the numbers of devices that can compute it.

    Attributes:
      global_batch_size: number of rows in a step, equal for every number of devices.
      device_counts: numbers of devices that can divide the batch, smallest first.
      devices_per_shard: number of devices that share the rows of one data shard (context x stage x
        model).
      micro_batch_sizes: allowed numbers of rows that a data shard computes in one forward pass.
    """

    global_batch_size: int
    device_counts: tuple[int, ...]
    devices_per_shard: int
    micro_batch_sizes: tuple[int, ...]

    def micro_batch_size(self, num_devices: int) -> int:
        """Returns the number of rows that a data shard computes in one forward pass: the largest
        allowed size that divides the shard's rows.

        Raises:
          ConfigError: `num_devices` devices cannot divide the batch; the message names the nearest
            number of devices that can.
        """
        if num_devices not in self.device_counts:
            shown = ", ".join(map(str, self.device_counts[:_MAX_SHOWN]))
            more = len(self.device_counts) - _MAX_SHOWN
            nearest = min(self.device_counts, key=lambda count: abs(count - num_devices))
            raise ConfigError(
                f"{num_devices} devices {self._why_not(num_devices)}; use {nearest} (possible are "
                f"{shown}{f' and {more} more' if more > 0 else ''})",
                ("elasticity",),
            )
        rows = self.global_batch_size * self.devices_per_shard // num_devices
        return max(size for size in self.micro_batch_sizes if rows % size == 0)

    def _why_not(self, num_devices: int) -> str:
        rows, rest = divmod(self.global_batch_size * self.devices_per_shard, num_devices)
        if rest or all(rows % size for size in self.micro_batch_sizes):
            return (
                f"cannot divide the elastic batch of {self.global_batch_size} rows into "
                f"micro-batches of {' or '.join(map(str, self.micro_batch_sizes))}"
            )
        return "are not allowed by min_devices, max_devices or devices_per_node of the elasticity"

    def num_microbatches(self, num_devices: int) -> int:
        """Returns the number of microbatches into which each data shard divides its rows.

        Raises:
          ConfigError: `num_devices` devices cannot divide the batch.
        """
        size = self.micro_batch_size(num_devices)
        return self.global_batch_size * self.devices_per_shard // (num_devices * size)


@names_keywords()
@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticityConfig:
    """Settings of an elastic run: one global batch size for many numbers of devices. The defaults
    are DeepSpeed's.

    The batch size depends only on these settings. The number of microbatches depends on the
    available devices. So losses are equal for all numbers of devices, up to rounding.
    """

    enabled: bool = False
    """true: this section sets global_batch_size and num_microbatches."""
    max_global_batch_size: int = 2000
    """Limit of the batch in rows. The chosen batch is at most this large, and many numbers of
    devices can divide it."""
    micro_batch_sizes: tuple[int, ...] = (2, 4, 6)
    """Allowed numbers of rows that a data shard computes in one forward pass; each must fit into
    memory."""
    min_devices: int = 1
    """Smallest number of devices of the run."""
    max_devices: int = 10_000
    """Largest number of devices of the run."""
    devices_per_node: int | None = None
    """Number of devices in a node, if devices join and leave in whole nodes. null: they join and
    leave one by one."""
    prefer_larger_batch: bool = True
    """Whether the larger of two batch sizes is chosen if equally many numbers of devices can divide
    them."""

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
        """Chooses the batch size, and lists the numbers of devices that can divide it.

        Args:
          devices_per_shard: number of devices that share the rows of one data shard (context x
            stage x model).

        Raises:
          ConfigError: a node is not a whole number of data shards, or no number of devices within
            the limits can divide a batch.
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
    """Chooses the candidate batch that the most numbers of units can divide; a unit is a node or
    the devices of a data shard.

    Returns:
      (batch, numbers of units that can divide it).
    """
    # DeepSpeed's candidates: multiples of each size, and of their least common multiple.
    bases = {base for base in (*sizes, math.lcm(*sizes)) if base <= largest}
    candidates = {base * _highly_composite(largest // base) for base in bases}
    found = [(batch, _counts(batch, sizes, limits)) for batch in candidates]
    sign = 1 if prefer_larger else -1
    return max(found, key=lambda one: (len(one[1]), sign * one[0]))


def _counts(batch: int, sizes: tuple[int, ...], limits: tuple[int, int]) -> tuple[int, ...]:
    """Returns the numbers of units (nodes or data shards) within `limits` for which the share of
    each unit is a whole number of micro-batches."""
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
    # The product of these primes and of the next one, 29, is above MAX_SIZE, the largest limit.
    for number, divisors in _falling_products(1, 1, 64, limit, (2, 3, 5, 7, 11, 13, 17, 19, 23)):
        if divisors > best[0] or (divisors == best[0] and number < best[1]):
            best = divisors, number
    return best[1]


def _falling_products(
    number: int, divisors: int, exponent: int, limit: int, primes: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    """Yields (product, number of its divisors) for all products of `primes` up to `limit` whose
    exponents do not increase from one prime to the next."""
    yield number, divisors
    if not primes:
        return
    for power in range(1, exponent + 1):
        number *= primes[0]
        if number > limit:
            return
        yield from _falling_products(number, divisors * (power + 1), power, limit, primes[1:])
