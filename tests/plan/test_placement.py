"""The table of placements: each rule on shapes alone, without a model or a device."""

import itertools
import math

import pytest
from jax.sharding import PartitionSpec as P

from zerojax.placement.leaf_placement import Access, PlacementRules
from zerojax.placement.table import place_parameters

AXES = {"replica": 1, "data": 8, "stage": 1, "model": 1}
TENSOR_PARALLEL = {**AXES, "data": 4, "model": 2}


def place(
    shapes,
    *,
    reads=None,
    axes=AXES,
    always_frozen=None,
    barriers=None,
    lazily=True,
    rows=None,
    **rules,
):
    """The rows for parameters that are read whole unless `reads` says otherwise."""
    read_shapes = {name: frozenset([shape]) for name, shape in shapes.items()}
    read_shapes |= {name: frozenset(found) for name, found in (reads or {}).items()}
    read_shapes = {name: found for name, found in read_shapes.items() if found}
    rules = PlacementRules(**{"zero": 3, "persistence_threshold": 0, **rules})
    placement = place_parameters(
        shapes,
        read_shapes,
        axes,
        rules,
        always_frozen=always_frozen,
        barriers=barriers,
        reads_lazily=lazily,
        layer_rows=rows,
    )
    return placement.leaves


def test_the_largest_dimension_that_divides_is_split():
    leaves = place({"a": (16, 24), "b": (9, 16), "c": (8, 100), "d": (8, 8, 32)})
    assert leaves["a"].stored_spec == P(None, "data")
    assert leaves["b"].stored_spec == P(None, "data")
    assert leaves["c"].stored_spec == P("data", None)
    assert leaves["d"].stored_spec == P(None, None, "data")
    assert all(leaf.zero_dim < 0 and not leaf.reasons for leaf in leaves.values())


def test_where_nothing_divides_the_largest_free_dimension_is_padded():
    leaf = place({"w": (3, 61, 30)})["w"]
    assert leaf.stored_shape == (3, 64, 30)
    assert leaf.is_padded
    (reason,) = leaf.reasons
    assert "dim 1 of 61 is padded to 64" in reason
    assert "data 8" in reason
    assert leaf.canonical_spec(AXES) == P(None, None, None)
    assert place({"w": (10, 16)})["w"].canonical_spec(AXES) == P(None, "data")


def test_a_canonical_spec_uses_another_dimension_that_divides():
    leaf = place({"w": (2, 8, 9)}, reads={"w": [(9,)]})["w"]
    assert leaf.stored_spec == P(None, None, "data")
    assert leaf.canonical_spec(AXES) == P(None, "data", None)


def test_dimensions_that_a_scan_slices_are_never_split():
    leaf = place({"blocks/w": (64, 8, 4)}, reads={"blocks/w": [(8, 4)]})["blocks/w"]
    assert leaf.stack_dims == 1
    assert leaf.stored_spec == P(None, "data", None)
    nested = place({"w": (16, 8, 3)}, reads={"w": [(3,), (16, 8, 3)]})["w"]
    assert nested.stack_dims == 2
    assert nested.stored_shape == (16, 8, 8)


def test_a_read_that_is_no_trailing_slice_needs_the_whole_parameter():
    leaf = place({"w": (16, 8)}, reads={"w": [(4, 8)]})["w"]
    assert leaf.access is Access.GATHER_ONCE
    assert leaf.stored_spec == P("data", None)
    assert leaf.reasons == (
        "is read with shape [4, 8], not a trailing slice of [16, 8]: gathered once per step",
    )


def test_scalars_and_empty_parameters_stay_whole():
    leaves = place({"scalar": (), "empty": (0,)})
    for leaf in leaves.values():
        assert leaf.access is Access.WHOLE
        (reason,) = leaf.reasons
        assert "not sharded" in reason


@pytest.mark.parametrize("zero", range(4))
def test_data_and_model_are_never_on_one_dimension(zero):
    shapes = dict(enumerate(itertools.product((2, 8, 12, 64), (2, 8, 12, 64))))
    shapes = {f"w{index}": shape for index, shape in shapes.items()}
    for rule in (("model", None), (None, "model"), ("model",)):
        leaves = place(shapes, axes=TENSOR_PARALLEL, tensor_parallel=[("w", rule)], zero=zero)
        for leaf in leaves.values():
            assert leaf.axes == ((None, *rule) if len(rule) == 1 else rule)
            assert all(axis is None or axis in ("data", "model") for axis in leaf.stored_spec)
            if zero:
                assert set(leaf.stored_spec) == {"data", "model"}


def test_the_first_tensor_parallel_rule_that_matches_counts():
    rules = [("query/kernel$", (None, "model", None)), ("kernel$", ("model",))]
    shapes = {"query/kernel": (7, 4, 6), "out/kernel": (6, 7, 4)}
    leaves = place(shapes, axes=TENSOR_PARALLEL, tensor_parallel=rules)
    assert leaves["query/kernel"].axes == (None, "model", None)
    assert leaves["out/kernel"].axes == (None, None, "model")


@pytest.mark.parametrize(
    ("shape", "rule", "message"),
    [
        ((8,), ("(w", ("model",)), r"'\(w' is not a regular expression"),
    ],
)
def test_tensor_parallel_rules_that_do_not_fit_are_refused(shape, rule, message):
    with pytest.raises(ValueError, match=message):
        place({"w": shape}, axes=TENSOR_PARALLEL, tensor_parallel=[rule])


@pytest.mark.parametrize(
    ("zero", "access"),
    [
        (0, Access.WHOLE),
        (1, Access.GATHER_ONCE),
        (2, Access.GATHER_ONCE_SCATTER_EARLY),
        (3, Access.GATHER_ON_USE),
    ],
)
def test_each_stage_has_its_access(zero, access):
    leaf = place({"w": (8, 8)}, zero=zero)["w"]
    assert leaf.access is access
    assert leaf.reasons == ()
    assert leaf.stored_spec == (P(None, None) if zero == 0 else P("data", None))


def test_one_data_shard_splits_nothing():
    assert place({"w": (8, 8)}, axes={**AXES, "data": 1})["w"].access is Access.WHOLE


def test_small_parameters_are_gathered_once_at_stage_3():
    leaves = place({"small": (8, 9), "large": (8, 10)}, persistence_threshold=80)
    assert leaves["large"].access is Access.GATHER_ON_USE
    assert leaves["small"].access is Access.GATHER_ONCE
    assert leaves["small"].reasons == (
        "fewer elements than persistence_threshold 80: gathered once per step",
    )
    assert place({"w": (8, 9)}, zero=2, persistence_threshold=80)["w"].reasons == ()


@pytest.mark.parametrize("zero", [2, 3])
def test_what_cannot_be_gathered_on_use_is_gathered_once(zero):
    leaves = place(
        {"w": (8, 8), "unread": (8, 8)}, zero=zero, reads={"unread": []}, barriers={"w": "why"}
    )
    assert leaves["w"].access is leaves["unread"].access is Access.GATHER_ONCE
    assert leaves["w"].reasons == ("why: gathered once per step",)
    assert leaves["unread"].reasons == ("is never read by the loss: gathered once per step",)


def test_functions_are_listed_since_all_is_gathered_as_they_start():
    (reason,) = place({"w": (8, 8)}, lazily=False)["w"].reasons
    assert reason == "a model of functions (init, apply) gathers all parameters when apply starts"


def test_frozen_parameters_are_sharded_and_integers_are_whole():
    leaves = place(
        {"a/w": (8, 8), "b/w": (8, 8), "index": (8,)},
        freeze=["^a"],
        always_frozen={"index": "int32 has no gradient: frozen and not sharded"},
    )
    assert [leaf.frozen for leaf in leaves.values()] == [True, False, True]
    assert leaves["a/w"].stored_spec == P("data", None)
    assert leaves["index"].access is Access.WHOLE
    assert leaves["index"].reasons == ("int32 has no gradient: frozen and not sharded",)


def test_counts():
    shapes = {"a": (8, 61), "b": (4, 8)}
    placement = place_parameters(
        shapes,
        {name: frozenset([shape]) for name, shape in shapes.items()},
        AXES,
        PlacementRules(zero=3, freeze=["b"]),
    )
    assert placement.num_parameters() == 8 * 61 + 32
    assert placement.num_parameters(frozen=True) == 32
    assert placement.shard_elements(placement.leaves["a"]) == 61
    assert [name for name, _ in placement.exceptions()] == ["a", "b"]


PIPELINE = {**AXES, "data": 2, "stage": 2, "model": 2}
EVEN, DEALT, UNEVEN = (0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 2, 3, 4, -1)


def place_stack(shape, rows, *, axes=PIPELINE, **rules):
    """One stack [layers, ...] on a pipeline, and one that is not."""
    reads = {"stack": [shape[1:]], "other": [shape[1:]]}
    return place(
        {"stack": shape, "other": shape}, reads=reads, axes=axes, rows={"stack": rows}, **rules
    )


def test_a_stack_on_a_pipeline_lies_in_rows():
    leaves = place_stack((5, 8, 6), UNEVEN, tensor_parallel=[("", (None, "model"))])
    leaf = leaves["stack"]
    assert (leaf.shape, leaf.stored_shape) == ((5, 8, 6), (6, 8, 6))
    assert leaf.is_padded
    assert leaf.stored_spec == P("stage", "data", "model")
    assert leaf.manual_spec == P("stage", "data", None)
    assert leaf.axes == (None, None, "model")
    other = leaves["other"]
    assert other.layer_rows is None
    # Every stage reads it, so none of it has to lie on two of them.
    both = P(None, ("data", "stage"), "model")
    assert other.stored_spec == other.canonical_spec(PIPELINE) == both
    assert other.manual_spec == P(None, ("data", "stage"), None)


def test_rows_and_the_dimension_of_data_are_padded_together():
    placement = place_parameters(
        {"w": (5, 7)},
        {"w": frozenset([(7,)])},
        PIPELINE,
        PlacementRules(zero=3),
        layer_rows={"w": UNEVEN},
    )
    leaf = placement.leaves["w"]
    assert leaf.stored_shape == (6, 8)
    assert placement.shard_elements(leaf) == 3 * 4
    assert placement.num_parameters() == 5 * 7


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("shape", "rows", "portable", "exchange"),
    [
        # stage divides the layers, and data its own dimension
        ((4, 8, 6), EVEN, P("stage", "data", None), P(None, "data", "stage")),
        ((4, 8, 6), DEALT, P("stage", "data", None), P(None, "data", "stage")),
        # the dimension of data is padded, and another would be that of stage
        ((4, 7, 5), EVEN, P("stage", None, None), P(None, ("data", "stage"), None)),
        ((4, 3, 6), EVEN, P("stage", None, "data"), P(None, None, "data")),
        # stage does not divide the layers: another free dimension, else below data, else nowhere
        ((5, 8, 6), UNEVEN, P(None, "data", "stage"), P(None, "data", "stage")),
        ((5, 8), UNEVEN, P(None, ("data", "stage")), P(None, ("data", "stage"))),
        ((5, 6), UNEVEN, P(None, "data"), P(None, "data")),
        ((5, 7), UNEVEN, P(None, None), P(None, ("data", "stage"))),
        ((4,), EVEN, P("stage"), P(None)),
        ((5,), UNEVEN, P(None), P(None)),
    ],
)
def test_the_portable_form_divides_evenly_and_rows_change_places_in_parts(
    shape, rows, portable, exchange
):
    leaf = place_stack(shape, rows)["stack"]
    assert leaf.canonical_spec(PIPELINE) == portable
    assert leaf.reorder_spec(PIPELINE) == exchange
    for spec, sizes in ((portable, leaf.shape), (exchange, leaf.stored_shape)):
        for entry, size in zip(spec, sizes, strict=True):
            names = [entry] if isinstance(entry, str) else entry or []
            assert size % math.prod(PIPELINE[name] for name in names) == 0


def test_data_goes_to_another_dimension_than_stage_where_its_own_is_padded():
    leaf = place({"w": (4, 8, 9)}, axes=PIPELINE, reads={"w": [(9,)]}, rows={"w": DEALT})["w"]
    assert leaf.stored_spec == P("stage", None, "data")
    assert leaf.canonical_spec(PIPELINE) == P("stage", "data", None)


def test_without_zero_stage_alone_splits():
    leaf = place_stack((4, 8), DEALT, zero=0)["stack"]
    assert leaf.access is Access.WHOLE
    assert leaf.stored_spec == leaf.canonical_spec(PIPELINE) == P("stage", None)


def test_a_stack_that_is_not_read_layer_by_layer_is_refused():
    shape = (4, 8)
    message = "stack is stacked over the layers of the pipeline, but is read whole; read it inside"
    with pytest.raises(ValueError, match=message):
        place({"stack": shape}, axes=PIPELINE, rows={"stack": EVEN})
    with pytest.raises(ValueError, match=r"but is read with shape \[2, 8\], not a trailing slice"):
        place({"stack": shape}, axes=PIPELINE, rows={"stack": EVEN}, reads={"stack": [(2, 8)]})


def test_a_rule_that_splits_the_layers_is_refused():
    message = "stack: its tensor-parallel rule splits dim 0 over model, but dim 0 counts the layers"
    with pytest.raises(ValueError, match=message):
        place_stack((4, 8), EVEN, tensor_parallel=[("", ("model", None))])
    with pytest.raises(ValueError, match="names the axis 'stage'; use 'model' or null"):
        place_stack((4, 8), EVEN, tensor_parallel=[("", ("stage", None))])
