"""Computes the batch sizes of a ds_config: train_batch_size, micro-batch, accumulation, elastic.

`train_batch_size = micro-batch x accumulation x data shards` must hold, so two of the three keys
determine the third.
"""

from __future__ import annotations

from zerojax.config import ConfigError, ElasticityConfig
from zerojax.config.batch_division import BatchDivision
from zerojax.config.late_dataclasses import dataclass
from zerojax.deepspeed_config.ds_config import File
from zerojax.deepspeed_config.translation import CallerValues

TRAIN, MICRO, PARTS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


@dataclass(frozen=True)
class Batch:
    """Batch sizes: rows of a step (`train`), rows of a micro-batch on one data shard (`micro`), and
    number of micro-batches (`parts`). None means not known yet."""

    train: int | None
    micro: int | None
    parts: int | None


def settle_batch(file: File, shards: int | None, given: CallerValues) -> Batch:
    """Returns the batch sizes of a ds_config; the caller's values replace "auto".

    Contradictions, and sizes that do not divide evenly, are noted as refusals.

    Args:
      file: the ds_config.
      shards: number of data shards; None if it is not known: sizes are then taken from the file
        only.
      given: values that the caller passed.
    """
    train = _agreed(file, TRAIN, given.global_batch_size, "the call or its batches have")
    parts = _agreed(file, PARTS, given.num_microbatches, "num_microbatches is")
    micro = file.optional(MICRO)
    for key, value in ((TRAIN, train), (MICRO, micro), (PARTS, parts)):
        if value is not None and value < 1:
            file.notes.refuse(key, value, "must be at least 1")
            return Batch(None, None, None)
    if train is None and micro is None:
        file.notes.reasons.append(
            f"neither {TRAIN} nor {MICRO} is a number: the size of the batches determines the "
            "rows of a step "
            "(DeepSpeed would refuse the file)"
        )
    if parts is None and (train is None or micro is None):
        parts = 1
        file.notes.reasons.append(f"{PARTS}=1: neither the file nor the call sets it")
    if shards is None:
        return Batch(train, micro, parts)
    return _with_shards(file, Batch(train, micro, parts), shards)


def _agreed(file: File, key: str, wanted: int | None, said: str) -> int | None:
    found = file.optional(key)
    if found is not None and wanted is not None and found != wanted:
        rows = (
            f"; in zerojax a batch has all rows of a step, over all devices and microbatches: "
            f"pass batches of {found} rows"
            if key == TRAIN
            else ""
        )
        file.notes.refuse(key, found, f'{said} {wanted}{rows}, or write "auto"')
    return wanted if found is None else found


def _with_shards(file: File, batch: Batch, shards: int) -> Batch:
    train, micro, parts = batch.train, batch.micro, batch.parts
    if train is None and micro is None:
        return batch
    if train is None:
        assert micro is not None
        assert parts is not None
        return Batch(micro * parts * shards, micro, parts)
    if micro is None:
        assert parts is not None
        return Batch(train, _divide(file, train, BatchDivision(shards, parts, PARTS)), parts)
    if parts is None:
        return Batch(train, micro, _divide(file, train, BatchDivision(shards, micro, MICRO)))
    if train != micro * parts * shards:
        file.notes.refuse(
            TRAIN,
            train,
            f"is not {MICRO}={micro} x {PARTS}={parts} x {shards} data shards = "
            f"{micro * parts * shards}; use this product, or leave one of the three keys out",
        )
    return batch


def _divide(file: File, train: int, division: BatchDivision) -> int | None:
    why = division.why_not(train, TRAIN)
    if why is None:
        return train // division.unit
    file.notes.refuse(TRAIN, train, why)
    return None


def settle_elastic(
    file: File, elasticity: ElasticityConfig, num_devices: int | None, devices_per_shard: int
) -> Batch:
    """Returns the batch sizes of a ds_config with the section `elasticity`; refuses batch keys
    beside it, as DeepSpeed does."""
    for key in (TRAIN, MICRO, PARTS):
        if file.has(key) and not file["elasticity.ignore_non_elastic_batch_info"]:
            file.notes.refuse(
                key,
                file[key],
                "the section elasticity determines the batch; remove this key, or set "
                "elasticity.ignore_non_elastic_batch_info",
            )
    try:
        batch = elasticity.choose_batch(devices_per_shard)
        if num_devices is None:
            return Batch(batch.global_batch_size, None, None)
        return Batch(
            batch.global_batch_size,
            batch.micro_batch_size(num_devices),
            batch.num_microbatches(num_devices),
        )
    except ConfigError as error:
        file.notes.refuse("elasticity", elasticity.max_global_batch_size, error.message)
        return Batch(None, None, None)


def check_rows(file: File, batch: Batch, given: CallerValues) -> None:
    """Refuses a batch size of the caller that differs from the elastic batch."""
    wanted = given.global_batch_size
    if None not in (wanted, batch.train) and wanted != batch.train:
        file.notes.refuse(
            "elasticity.max_train_batch_size",
            file["elasticity.max_train_batch_size"],
            f"results in batches of {batch.train} rows, but the call or its batches have {wanted}; "
            f"pass batches of {batch.train} rows, over all devices",
        )


def elasticity_of(file: File) -> ElasticityConfig:
    """Returns the section `elasticity` of a ds_config as an `ElasticityConfig`."""
    nodes = file["elasticity.num_gpus_per_node"]
    try:
        return ElasticityConfig(
            enabled=file["elasticity.enabled"],
            max_global_batch_size=file["elasticity.max_train_batch_size"],
            micro_batch_sizes=tuple(file["elasticity.micro_batch_sizes"]),
            min_devices=file["elasticity.min_gpus"],
            max_devices=file["elasticity.max_gpus"],
            devices_per_node=nodes if nodes > 1 else None,
            prefer_larger_batch=file["elasticity.prefer_larger_batch"],
        )
    except ConfigError as error:
        file.notes.refuse("elasticity", ".".join(error.key), error.message)
        return ElasticityConfig()
