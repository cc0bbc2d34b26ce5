"""Device groups of collectives, in each of XLA's notations."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?P<order>.*?)\{(?P<axes>[^{}]*)\}$")
_MESH_AXIS = re.compile(r"\s*(.+?)=(\d+)\s*")
_AXIS = re.compile(r"(.+?)(?::\((\d+)\)(\d+))?")

Group = tuple[int, ...]


def read_groups(text: str, num_devices: int) -> list[Group]:
    """The groups of devices of a collective.

    Args:
      text: of `replica_groups`: `{{0,1},{2,3}}`, `[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)` or
        `mesh['data'=4,'model'=2] {'data'}`; `{}` is one group of all.
      num_devices: that run the program.

    Returns:
      Positions of devices in the mesh that the program was compiled for.

    Raises:
      ValueError: another spelling.
    """
    if not text.strip("{} "):
        return [tuple(range(num_devices))]
    if text.startswith("mesh"):
        return _read_mesh(text)
    if found := _IOTA.fullmatch(text):
        shape, source, order = (_integers(part or "") for part in found.groups())
        ids = _transposed(range(math.prod(source)), source, order or range(len(source)))
        return _cut(ids, shape[-1])
    if text.startswith("{{"):
        return [_integers(group) for group in re.findall(r"\{([\d,\s]*)\}", text)]
    raise ValueError(
        f"replica_groups={text!r} is a spelling that zerojax does not know; "
        "add it to zerojax/forecasting/hlo/groups.py"
    )


def read_pairs(text: str) -> list[tuple[int, int]]:
    """Source and target of each transfer of a permute: `{{0,1},{1,0}}`."""
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),\s*(\d+)\}", text)]


def connected(pairs: Sequence[tuple[int, int]]) -> Group:
    """The devices that the first pair reaches, over any number of pairs; () without pairs."""
    group = set(pairs[0]) if pairs else set()
    while more := {d for pair in pairs if group.intersection(pair) for d in pair} - group:
        group |= more
    return tuple(sorted(group))


def _read_mesh(text: str) -> list[Group]:
    """`mesh['a'=4,'b'=2] {'b','a':(1)2}`: groups along axes, or parts of axes, of a mesh.

    `'a':(2)2` is the part of `a` between strides: an axis of 8 read as [2, 2, 2], the middle one.
    Between mesh and axes the devices' order may stand, as ids, as `device_ids=([[0,2],[1,3]])`
    or as `device_ids=([2,4]T(1,0))`, all of them counted in [2, 4] and transposed.
    Source: MeshAxesReplicaGroupList in OpenXLA's xla/hlo/ir/replica_group.cc.
    """
    found = _MESH.fullmatch(text)
    if found is None:
        raise ValueError(
            f"replica_groups={text!r} is no mesh with axes such as mesh['a'=2] {{'a'}}"
        )
    axes = [_MESH_AXIS.fullmatch(axis) for axis in found[1].split(",")]
    sizes = {axis[1]: int(axis[2]) for axis in axes if axis}
    wanted = [_AXIS.fullmatch(axis.strip()) for axis in found["axes"].split(",")]
    # Each axis is cut into as many dimensions as its parts need; `grouped` are those asked for.
    parts = [(part[1], part[2], part[3]) for part in wanted if part]
    dims: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        for stride, length in _cut_axis(
            size, [(int(pre), int(n)) for axis, pre, n in parts if axis == name and pre]
        ):
            place[name, stride] = len(dims)
            dims.append(length)
    grouped = [place[name, int(pre or 1)] for name, pre, _ in parts]
    rest = [dim for dim in range(len(dims)) if dim not in grouped]
    ids = _transposed(_mesh_order(found["order"], math.prod(dims)), dims, [*rest, *grouped])
    return _cut(ids, math.prod(dims[dim] for dim in grouped))


def _cut_axis(size: int, parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(what is before it, length) of each dimension an axis is cut into."""
    cut, before = [], 1
    for pre, length in sorted(parts):
        if pre > before:
            cut.append((before, pre // before))
        cut.append((pre, length))
        before = pre * length
    if before < size or not cut:
        cut.append((before, size // before))
    return cut


def _mesh_order(text: str, count: int) -> Sequence[int]:
    iota = re.search(r"<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text) or re.search(
        r"\(\[([\d,]+)\]T\(([\d,]+)\)", text
    )
    if iota:
        source = _integers(iota[1])
        return _transposed(range(count), source, _integers(iota[2] or "") or range(len(source)))
    ids = _integers(text.partition("device_ids=")[2])
    if text.strip() and len(ids) != count:
        raise ValueError(f"{text!r} between mesh and axes names {len(ids)} devices of {count}")
    return ids or range(count)


def _integers(text: str) -> Group:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _transposed(ids: Sequence[int], shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """`numpy.reshape(ids, shape).transpose(order).ravel()`."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    places = itertools.product(*(range(shape[dim]) for dim in order))
    return [ids[sum(i * strides[dim] for i, dim in zip(p, order, strict=True))] for p in places]


def _cut(ids: Sequence[int], size: int) -> list[Group]:
    return [tuple(ids[start : start + size]) for start in range(0, len(ids), size)]
