"""`mesh.lookup: owners`: the numbers of one device, with tables that are never gathered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import zerojax
from tests.processes.test_processes import train_here
from tests.support.recipe import RECIPE
from tests.support.trajectories import TOLERANCE, advance, plan_for, train_for
from zerojax import deepspeed_config as deepspeed
from zerojax import passes
from zerojax.models.losses import next_token
from zerojax.optim.precision import Precision
from zerojax.passes.table_reads import StandIn, with_lookups
from zerojax.placement.leaf_placement import Access
from zerojax.step.build import build_evaluation, build_step, pass_config
from zerojax.step.initialization import init_state
from zerojax.step.reshard import reshard_state, to_portable_state
from zerojax.tracing.row_lookups import RowReads
from zerojax.transport.owned_tables import OwnedTable
from zerojax.zoo.llama import Llama, LlamaConfig

STEPS = 6
ROWS, WIDTH = 640, 16
OF_A_LEAF = {"float32": 1e-5, "float64": 1e-12}
"""Of a leaf's largest entry: where all tokens are one row, 512 gradients are summed in other
orders."""
KINDS = ("uniform", "one row", "Zipf")
TABLE = "embed/embedding"


def ids_of(kind, shape, rows, seed=0):
    random = np.random.default_rng(seed)
    if kind == "uniform":
        ids = random.integers(0, rows, shape)
    elif kind == "Zipf":
        ids = np.minimum(random.zipf(1.3, shape) - 1, rows - 1)
    else:
        ids = np.full(shape, rows - 1)
    return ids.astype(np.int32)


def batch_of(kind, width=16):
    """index -> tokens and targets [32, width]; batches repeat after four."""

    def batch(index):
        targets = np.random.default_rng(99 + index % 4).integers(0, 32, (32, width))
        tokens = ids_of(kind, (32, width), ROWS, index % 4)
        return {"tokens": tokens, "targets": targets.astype(np.int32)}

    return batch


class Reader(nnx.Module):
    """A table, a layer, a head of its own; read as `way` says."""

    def __init__(self, rngs, way="embed", width=WIDTH, rows=ROWS):
        self.way = way
        self.embed = nnx.Embed(rows, width, rngs=rngs)
        self.middle = nnx.Linear(width, width, rngs=rngs)
        self.head = nnx.Linear(width, rows if way == "tied" else 32, rngs=rngs)

    def rows_of(self, tokens):
        table = self.embed.embedding
        if self.way == "twice":
            return self.embed(tokens) + 0.5 * table[...][(tokens + 1) % ROWS]
        if self.way == "conditional":
            return lax.cond(tokens[0, 0] >= 0, self.embed, lambda x: 2 * self.embed(x), tokens)
        if self.way == "checkpoint":
            return nnx.remat(lambda model, tokens: jnp.tanh(model.embed(tokens)))(self, tokens)
        if self.way == "computed":
            return (table[...] * 2)[tokens]
        return self.embed(tokens)

    def logits(self, batch):
        x = jnp.tanh(self.middle(self.rows_of(batch["tokens"])))
        return self.embed.attend(x) if self.way == "tied" else self.head(x)

    def loss(self, batch):
        return next_token(self.logits(batch), batch["targets"])


def reader(**changes):
    return lambda rngs: Reader(rngs, **changes)


def owners(**options):
    return {"zero": 3, "lookup": "owners", "persistence_threshold": 1, "steps": STEPS, **options}


def is_looked_up(plan, name=TABLE):
    leaf = plan.placement.leaves[name]
    assert (leaf.access is Access.LOOK_UP) == (leaf.row_reads is not None)
    return leaf.row_reads is not None


@functools.cache
def on_one_device(kind="uniform", way="embed"):
    return train_for(reader(way=way), devices=1, steps=STEPS, batch=batch_of(kind))


def difference(many, one):
    """The largest difference."""
    return differences(many, one).max()


def differences(many, one):
    """Relative to values above 1: their rounding grows with them."""
    return np.abs(many - one) / np.maximum(1.0, np.abs(one))


def assert_same_run(many, one):
    assert is_looked_up(many.plan)
    assert difference(many.losses, one.losses) <= TOLERANCE
    assert difference(many.norms, one.norms) <= TOLERANCE


# --- equality with one device ---------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_norms_are_those_of_one_device(kind, stage):
    one = on_one_device(kind)
    assert one.losses[0] - one.losses[4] > 0.004  # of the same batch
    many = train_for(reader(), batch=batch_of(kind), **owners(zero=stage))
    assert_same_run(many, one)


@functools.cache
def gradients(devices, kind, *, precision="fp32", **options):
    """{name: the summed gradient at the state of seed 0, in true shape}."""
    batch = batch_of(kind)
    plan = plan_for(reader(), devices=devices, batch=batch, precision=precision, **options)
    state = init_state(plan, 0)
    given = state["params"], state["frozen"], state["extras"], jax.random.key_data(state["rng"])
    placed = jax.device_put(batch(0), plan.batch_sharding)
    grads = jax.jit(passes.build_gradients(pass_config(plan)))(*given, placed, None)[1]
    return {name: np.asarray(grad, np.float64) for name, grad in grads.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_those_of_one_device(stage, kind):
    one = gradients(1, kind)
    many = gradients(8, kind, zero=stage, lookup="owners", persistence_threshold=1)
    assert one.keys() == many.keys()
    for name, grad in one.items():
        bound = OF_A_LEAF["float32"] * np.abs(grad).max()
        assert bound > 0
        np.testing.assert_allclose(many[name], grad, rtol=0, atol=bound, err_msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"replica": 2, "data": 4}},
        {"optimizer": zerojax.adamw(1e-3, eps=1e-5, **RECIPE)},
        {"reduce_dtype": "bf16"},
        {"precision": "fp16"},
    ],
    ids=["replicas", "update in place", "reductions in bfloat16", "loss scale"],
)
def test_combinations_too(options):
    """Weights are read in the compute dtype, whatever gradients travel in; these are rounded."""
    one = {name: value for name, value in options.items() if name != "mesh"}
    first = train_for(reader(), devices=1, steps=STEPS, batch=batch_of("Zipf"), **one)
    many = train_for(reader(), batch=batch_of("Zipf"), **owners(zero=2, **options))
    assert is_looked_up(many.plan)
    unlike = differences(many.losses, first.losses)
    assert unlike[0] <= (2e-3 if "precision" in options else TOLERANCE)
    bound = 2e-3 if options.keys() & {"precision", "reduce_dtype"} else TOLERANCE
    assert unlike.max() <= bound


WAYS = {
    **{f"accumulated, stage {n}": ("embed", {"zero": n, "num_microbatches": 4}) for n in (1, 2, 3)},
    # Once more in the backward pass; nnx hands the table out of the checkpoint, too.
    "in a checkpoint": ("checkpoint", {}),
    "twice": ("twice", {}),
    "frozen": ("embed", {"freeze": "embed"}),
}
ASKED = {"in a checkpoint": RowReads(rows=64, again=64), "twice": RowReads(rows=2 * 64)}


@pytest.mark.thorough
@pytest.mark.parametrize("name", WAYS)
def test_ways_to_read_a_table(name):
    way, options = WAYS[name]
    frozen = {key: value for key, value in options.items() if key == "freeze"}
    one = train_for(reader(way=way), devices=1, steps=STEPS, batch=batch_of("Zipf"), **frozen)
    many = train_for(reader(way=way), batch=batch_of("Zipf"), **owners(**options))
    asked = many.plan.placement.leaves[TABLE].row_reads
    assert asked == ASKED.get(name, asked)
    assert_same_run(many, one)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_bfloat16(kind):
    """Each token's is rounded to 8 bits, and so is their sum: 2 ** -7 of the largest, as where the
    table is gathered."""
    exact = gradients(1, kind)[TABLE]
    given = {"zero": 3, "lookup": "owners", "persistence_threshold": 1}
    found = gradients(8, kind, precision="bf16", **given)[TABLE]
    assert np.abs(found - exact).max() <= 2**-7 * np.abs(exact).max()


@pytest.mark.thorough
def test_bfloat16_losses_are_the_bits_of_a_gathered_table():
    first = [
        train_for(reader(), batch=batch_of("Zipf"), precision="bf16", **owners(lookup=lookup))
        for lookup in ("gather", "owners")
    ]
    assert first[0].losses[0] == first[1].losses[0]
    assert np.abs(first[0].losses - first[1].losses).max() <= 2e-4


@pytest.mark.thorough
def test_evaluation_is_that_of_one_device():
    """Of the plan's loss, and of one that reads all of the table."""

    def largest(model, batch):
        table = model.embed.embedding[...]
        return jnp.sum(jnp.abs(table)) + jnp.sum(model.embed(batch["tokens"])) * 0

    def value(loss, devices, **options):
        plan = plan_for(reader(), devices=devices, batch=batch_of("Zipf"), **options)
        batch = jax.device_put(batch_of("Zipf")(0), plan.batch_sharding)
        found = build_evaluation(plan, loss)(init_state(plan, 0), batch)
        return float(found["loss"]) / float(found["weight"])

    given = {"zero": 3, "lookup": "owners", "persistence_threshold": 1}
    assert value(None, 8, **given) == pytest.approx(value(None, 1), abs=TOLERANCE)
    assert value(largest, 8, **given) == pytest.approx(value(largest, 1), rel=1e-6)


@pytest.mark.thorough
def test_a_decoder_with_a_head_of_its_own():
    sizes = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 16}
    config = LlamaConfig(vocab_size=ROWS, max_seq_len=16, remat="full", **sizes)
    model = lambda rngs: Llama(config, rngs=rngs)  # noqa: E731
    one = train_for(model, devices=1, steps=STEPS, batch=batch_of("Zipf"))
    many = train_for(model, batch=batch_of("Zipf"), **owners())
    assert is_looked_up(many.plan, "token_embedding/embedding")
    assert not is_looked_up(many.plan, "lm_head/kernel")
    assert difference(many.losses, one.losses) <= TOLERANCE


@pytest.mark.thorough
def test_a_pair_of_functions():
    def init(key):
        one, two = jax.random.split(key)
        head = 0.1 * jax.random.normal(two, (WIDTH, 32))
        return {"table": jax.random.normal(one, (ROWS, WIDTH)), "head": head}

    def apply(params, tokens):
        return jnp.tanh(params["table"][tokens]) @ params["head"]

    def loss(model, batch):
        return next_token(model(batch["tokens"]), batch["targets"])

    given = {"loss": loss, "batch": batch_of("Zipf")}
    one = train_for((init, apply), devices=1, steps=STEPS, **given)
    many = train_for((init, apply), **given, **owners())
    assert is_looked_up(many.plan, "table")
    assert difference(many.losses, one.losses) <= TOLERANCE


# --- programs, in float64 -------------------------------------------------------------------------


def looped(table, ids):
    _, rows = lax.scan(lambda carry, some: (carry, table[some]), 0, ids.reshape(4, -1))
    return rows.reshape(ids.size, -1)


def turned(table, ids):
    """A gather whose rows lie in dimension 0 of the result."""
    numbers = lax.GatherDimensionNumbers((0,), (0,), (0,))
    sizes = (1, table.shape[1])
    return lax.gather(table, ids[:, None], numbers, sizes, mode="clip").T


PROGRAMS = {
    "take": lambda table, ids: jnp.take(table, ids, axis=0),
    "take 7": lambda table, ids: jnp.take(table, ids, axis=0, mode="fill", fill_value=7),
    "clip": lambda table, ids: jnp.take(table, ids, axis=0, mode="clip"),
    "index": lambda table, ids: table[ids],
    "promise": lambda table, ids: table.at[ids].get(
        mode="promise_in_bounds", wrap_negative_indices=False
    ),
    "mapped": lambda table, ids: jax.vmap(lambda one: table[one[None]][0])(ids),
    "loop": looped,
    "checkpoint": lambda table, ids: jax.checkpoint(lambda t, i: jnp.sin(t[i]))(table, ids),
    "returned": lambda table, ids: jax.checkpoint(lambda t, i: (t, 2 * t[i]))(table, ids)[0][ids],
    "jit": lambda table, ids: jax.jit(lambda t, i: 2 * t[i])(table, ids),
    "turned": turned,
    "unsigned": lambda table, ids: table[ids.astype(jnp.uint32)],
}


def value_and_slope(program, table, ids, weights):
    """(rows [T, width], gradient of the sum of weights * rows)."""
    rows = program(table, ids)
    return rows, jax.grad(lambda table: jnp.sum(program(table, ids) * weights))(table)


def looked_up(program, table, ids, weights):
    """The same on 8 devices, each with columns of the table and rows of all else."""
    lies = OwnedTable(*table.shape, ("data",), table.dtype.name, table.dtype.name)
    read = StandIn("table", lies)
    function = lambda shard, ids: program(read(shard), ids)  # noqa: E731
    run = with_lookups(function, {"table": lies}, lambda shard, ids: {"table": shard})
    specs = {"in_specs": (P(None, "data"), P("data"), P("data"))}
    mapped = jax.shard_map(
        functools.partial(value_and_slope, run),
        mesh=Mesh(np.array(jax.devices()), "data"),
        out_specs=(P("data"), P(None, "data")),
        check_vma=False,
        **specs,
    )
    return jax.jit(mapped)(table, ids, weights)


OF_KINDS = {**dict.fromkeys(KINDS, (pytest.mark.thorough,)), "out of range": ()}
"""Ids out of range are among ids in range: the quick cases of each program."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if name == "take" else marks)
        for name in PROGRAMS
        for kind, marks in OF_KINDS.items()
    ],
)
def test_values_and_gradients_in_float64(name, kind):
    """Ids out of range give what they give of a whole table, and so do their gradients."""
    rows, count = 40, 8 * 24
    random = np.random.default_rng(0)
    if kind == "out of range":
        ids = random.integers(-90, 90, count).astype(np.int32)
    else:
        ids = ids_of(kind, count, rows)
    with jax.enable_x64(True):
        table, weights = random.normal(size=(rows, WIDTH)), random.normal(size=(count, WIDTH))
        given = jnp.asarray(table), jnp.asarray(ids), jnp.asarray(weights)
        wanted = value_and_slope(PROGRAMS[name], *given)
        found = looked_up(PROGRAMS[name], *given)
    if kind == "out of range":
        assert np.isnan(wanted[0]).any() == (name == "take")
    for one, other in zip(wanted, found, strict=True):
        bound = OF_A_LEAF["float64"] * np.abs(np.nan_to_num(one)).max()
        assert bound > 0
        np.testing.assert_allclose(other, one, rtol=0, atol=bound)


@pytest.mark.thorough
def test_a_table_in_another_dtype():
    """Cast where it is read: rows are cast; what stands for those out of range is not rounded."""

    def program(table, ids):
        return jnp.take(table.astype(jnp.float32), ids, 0, mode="fill", fill_value=0.1)

    ids, random = jnp.arange(64) % 41, np.random.default_rng(0)
    table = jnp.asarray(random.normal(size=(40, WIDTH)), jnp.bfloat16)
    weights = jnp.asarray(random.integers(-4, 5, (64, WIDTH)), jnp.float32)
    wanted = value_and_slope(program, table, ids, weights)
    for one, other in zip(wanted, looked_up(program, table, ids, weights), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.thorough
def test_gradients_of_a_row_are_summed_in_float32():
    """800 times 1; a sum in bfloat16 ends at 256."""
    table, ids = jnp.ones((40, WIDTH), jnp.bfloat16), jnp.full(800, 3)
    ones = jnp.ones((800, WIDTH), jnp.bfloat16)
    _, slope = looked_up(PROGRAMS["index"], table, ids, ones)
    expected = np.zeros((40, WIDTH))
    expected[3] = 800
    np.testing.assert_array_equal(np.asarray(slope, np.float32), expected)


# --- where things lie -----------------------------------------------------------------------------


def test_each_device_has_columns_and_the_plan_says_what_it_sends():
    plan = plan_for(reader(), batch=batch_of("uniform"), lookup="owners", zero=1)
    leaf = plan.placement.leaves[TABLE]
    assert leaf.stored_spec == P(None, "data")
    assert leaf.row_reads == RowReads(rows=64)
    # 7 of 8 parts of 64 rows of 64 bytes, there and back, for a gather and a scatter of the table.
    assert (
        f"lookup=owners: {TABLE} is never gathered, and only rows of it and "
        "of its gradient are sent, 7.0 KiB "
        "sent by each device in a step instead of 70.0 KiB"
    ) in plan.reasons
    page = plan.explain(TABLE)
    assert "look up, 64 rows as float32[16]" in page
    assert page.count("all-to-all over data in float32, once: 3.5 KiB sent") == 2


@pytest.mark.thorough
def test_a_state_goes_from_columns_to_a_gathered_table_and_back_bit_by_bit():
    """Checkpoints hold portable arrays, which are the same."""
    run = train_for(reader(), batch=batch_of("Zipf"), **owners(steps=3))
    expected = jax.tree.map(np.asarray, to_portable_state(run.plan, run.state))
    plan, state = run.plan, run.state
    for options in {"zero": 3}, {"zero": 1, "lookup": "owners"}, {"zero": 2}:
        old, plan = plan, plan_for(reader(), batch=batch_of("Zipf"), **options)
        assert is_looked_up(plan) == ("lookup" in options)
        state = reshard_state(old, plan, state)
        found = to_portable_state(plan, state)
        assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))
    rest = advance(plan, state, range(3, STEPS), batch=batch_of("Zipf"))
    assert difference(rest.losses, on_one_device("Zipf").losses[3:]) <= TOLERANCE


@pytest.mark.thorough
def test_a_run_goes_on_without_it_from_its_checkpoint(tmp_path):
    """By command, from files: steps 1 and 2 with lookups, 3 and 4 without."""

    train = lambda run, steps, lookup: train_here(  # noqa: E731
        tmp_path / run, steps, f"mesh.lookup={lookup}"
    )
    train("changed", 2, "owners")
    shown = "".join(path.read_text() for path in (tmp_path / "changed").glob("*.txt"))
    assert "token_embedding/embedding is never gathered" in shown
    changed, alone = train("changed", 4, "gather"), train("alone", 4, "gather")
    assert len(changed) == 4
    assert difference(np.array(changed), np.array(alone)) <= TOLERANCE


def test_deepspeeds_key():
    """Of an untied table; false leaves it gathered."""
    adam = {"type": "AdamW", "params": {"lr": 0.001}}
    file = {"train_batch_size": 32, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
    for asked, lookup in (True, "owners"), (False, "gather"):
        translation = deepspeed.translate({**file, "sparse_gradients": asked}, num_devices=8)
        assert (translation.mesh.zero, translation.mesh.lookup) == (2, lookup)
    engine = zerojax.initialize(
        model=reader(),
        config={**file, "sparse_gradients": True, "optimizer": adam},
        example_batch=batch_of("Zipf")(0),
    )
    assert is_looked_up(engine.plan)


# --- what is not looked up, and what is refused ---------------------------------------------------


def says(words, model=None, *, batch=None, **options):
    given = {"zero": 3, "persistence_threshold": 1, **options}
    plan = plan_for(model or reader(), batch=batch or batch_of("uniform"), lookup="owners", **given)
    assert not any(leaf.row_reads for leaf in plan.placement.leaves.values())
    (line,) = [reason for reason in plan.reasons if reason.startswith("lookup=owners")]
    assert words in line
    assert "\n" not in line
    return plan


def test_the_plan_says_why_a_table_is_gathered_all_the_same():
    """From the traced loss, not from names."""
    says("goes into `transpose`", reader(way="tied"))
    says("has no effect: the loss looks up rows of no parameter", reader(way="computed"))
    says("has no effect: zero=0 does not shard tables", zero=0)
    says("has no effect: the data axis has one device", devices=1)
    says("data=8 does not divide its 12 columns", reader(width=12))
    says("fewer elements than persistence_threshold 20000", persistence_threshold=20_000)
    more = "the rows of a step are 128.0 KiB, the table and its gradient 80.0 KiB"
    says(more, batch=batch_of("uniform", 256))


@pytest.mark.thorough
def test_a_tied_table_trains_as_without():
    runs = [
        train_for(reader(way="tied"), batch=batch_of("uniform"), **owners(lookup=lookup))
        for lookup in ("gather", "owners")
    ]
    np.testing.assert_array_equal(runs[0].losses, runs[1].losses)


def test_rows_that_not_every_device_may_ask_for_are_not_looked_up():
    says("it is read inside `cond`, which not every device may", reader(way="conditional"))


def refused(words, **options):
    with pytest.raises(ValueError, match=words) as caught:
        plan_for(reader(), batch=batch_of("uniform"), lookup="owners", **options)
    assert "\n" not in str(caught.value)


def test_settings_that_are_not_proven_are_refused():
    for axis in "model", "stage", "context", "expert":
        refused(f"lookup=owners with {axis}=2 is not supported", mesh={axis: 2})
    refused("lookup=owners with deterministic='mesh'", deterministic="mesh")
    refused("lookup=owners with offload", offload={"opt_state": "host"})
    refused("lookup=owners with wire.weights=fp8", wire={"weights": "fp8"}, zero=3)
    refused("lookup=owners with freeze_codes='int8'", precision=Precision(freeze_codes="int8"))
    for update in zerojax.lamb(1e-2), zerojax.adam8bit(1e-2):
        refused(f"lookup=owners .*optimizer {update.kernel}", optimizer=update, zero=1)
        plan_for(reader(), batch=batch_of("uniform"), lookup="gather", optimizer=update, zero=1)
    for update in zerojax.adamw(1e-2), zerojax.lion(1e-2), zerojax.sgd(1e-2):
        plan = plan_for(reader(), batch=batch_of("uniform"), optimizer=update, **owners())
        assert is_looked_up(plan)


# --- mistakes that these tests see ----------------------------------------------------------------


@pytest.mark.thorough
def test_nothing_of_the_tables_size_is_in_the_program_of_a_step():
    """Nothing else has its shape: not the rows of all devices, nor another parameter."""
    shapes = {}
    for lookup in "gather", "owners":
        given = {"zero": 3, "persistence_threshold": 1, "lookup": lookup}
        plan = plan_for(reader(), batch=batch_of("Zipf"), **given)
        lowered = build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
        shapes[lookup] = f"f32[{ROWS},{WIDTH}]" in lowered.compile().as_text()
    assert shapes == {"gather": True, "owners": False}
