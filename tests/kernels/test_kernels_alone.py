"""`pallas_kernels` as somebody uses it who has nothing of zerojax."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import optimizers
from pallas_kernels.adam8bit import init_moments
from pallas_kernels.adam8bit_kernel import update_adam8bit
from pallas_kernels.choice import choose
from pallas_kernels.update import update
from tests.support.marks import needs_kernels

PACKAGE = Path(__file__).parents[2] / "pallas_kernels"


@pytest.mark.thorough
def test_the_example_of_the_readme_runs_where_there_is_no_zerojax(tmp_path):
    (tmp_path / "pallas_kernels").symlink_to(PACKAGE)
    (tmp_path / "zerojax.py").write_text("raise ImportError('not installed')")
    (code,) = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr


X, SEED = jnp.ones((300,)), jnp.zeros((2,), jnp.uint32)
MOMENTS, SCALARS = init_moments((300,)), optimizers.adam_scalars(1e-3, count=1)
LION = optimizers.lion_scalars(1e-3)


def eight_bit(moments=MOMENTS, **changes):
    options = {"scalars": SCALARS, "seed": SEED, "impl": "xla", **changes}
    return lambda: update_adam8bit(X, moments, X, **options)


def lion(**changes):
    options = {"scalars": LION, "impl": "xla", **changes}
    return lambda: update(optimizers.LION, (X, X), (X,), **options)


REFUSED = {
    "scalars of another": (
        lion(scalars=SCALARS),
        "lion: scalars are AdamScalars, but must be LionS",
    ),
    "no scalars": (eight_bit(scalars=(1e-3,)), "scalars are tuple, but must be .*adam_scalars"),
    "a key": (lion(seed=jax.random.key(0)), r"lion: seed is key<fry>\[\], .*rounding.seed_of"),
    "signed": (eight_bit(seed=SEED.astype(jnp.int32)), r"seed is int32\[2\], but must be uint32"),
    "a long seed": (
        lion(seed=jnp.zeros((3,), jnp.uint32)),
        r"uint32\[3\], but must be uint32\[2\]",
    ),
    "float32 moments": (eight_bit(MOMENTS._replace(mu=X)), "mu is float32, .* encode_moments"),
    "half scales": (
        eight_bit(MOMENTS._replace(nu_scale=MOMENTS.nu_scale.astype(jnp.bfloat16))),
        "nu_scale is bfloat16, but must be float32",
    ),
    "an integer copy": (eight_bit(compute_dtype=jnp.int8), "compute_dtype=int8 is not one of"),
}


@pytest.mark.parametrize(("call", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_computed_wrongly_is_refused_with_the_remedy(call, sentence):
    with pytest.raises(TypeError, match=sentence):
        call()


@needs_kernels
def test_no_devices_are_no_gpu():
    assert "there is no device" in choose("auto", kernel="adam8bit", devices=[]).reason
