"""Files of the user's cache that are damaged, of another place, or that others can write.

Compiled programs: test_kept_programs.py.
"""

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from zerojax.data import best_fit
from zerojax.data.best_fit import best_fit_decreasing, packing_of
from zerojax.forecasting import forecast_cache
from zerojax.hardware import machine_rates
from zerojax.hardware.machine_rates import (
    MeasuredDevice,
    MeasuredLink,
    MeasuredNode,
    keep_rates,
    kept_rates,
)
from zerojax.runtime.launch.handshake import Token
from zerojax.training.tuning.kept_choices import Kept, KeptChoices

KEYS = [forecast_cache.key_of(number) for number in range(2)]
LENGTHS = np.random.default_rng(1).integers(1, 33, 200)
CHOICES = [{"what": name, "ways": ["a", "b"]} for name in ("adamw", "lion")]


class Kind(NamedTuple):
    """A kind of entry of the cache.

    Attributes:
      store: stores entry 0 or 1.
      load: returns whether entry 0 or 1 is there, after a check of its value.
      file: pattern of the names of its files.
      has_file_each: whether each entry has a file of its own.
    """

    store: Callable[[int], object]
    load: Callable[[int], bool]
    file: str
    has_file_each: bool = True


def kind_of_rates(kind: Any, field: str, **others: float) -> Kind:
    """Measurements of cards 0 and 1, told apart by one rate."""

    def store(number: int) -> None:
        keep_rates(kind(device_kind=f"card {number}", **{field: 1.0 + number}, **others))

    def load(number: int) -> bool:
        found = [one for one in kept_rates(kind) if one.device_kind == f"card {number}"]
        assert all(getattr(one, field) == 1.0 + number for one in found)
        return bool(found)

    return Kind(store, load, "rates.json", has_file_each=False)


RATES = {
    "link rates": kind_of_rates(MeasuredLink, "to_device", to_host=2.0, both=3.0),
    "device rates": kind_of_rates(MeasuredDevice, "product_flops", copy_bandwidth=2.0),
    "node rates": kind_of_rates(MeasuredNode, "bandwidth"),
}


def store_choice(number: int) -> None:
    kept = Kept(choice="ab"[number], seconds=1.0, other_seconds=2.0, date="2026-01-01")
    KeptChoices.of_user().keep(CHOICES[number], kept)


def load_choice(number: int) -> bool:
    found = KeptChoices.of_user().find(CHOICES[number])
    assert found is None or found.choice == "ab"[number]
    assert len(KeptChoices.of_user().all()) <= 2
    return found is not None


def store_mark(number: int) -> None:
    with KeptChoices.of_user().marked(CHOICES[number]) as stays:
        stays()


def load_mark(number: int) -> bool:
    found = KeptChoices.of_user()
    assert (CHOICES[number] in found.tried()) == found.is_marked(CHOICES[number])
    return found.is_marked(CHOICES[number])


def load_forecast(number: int) -> bool:
    found = forecast_cache.load(KEYS[number])
    assert found in (None, {"seconds": 1.5 + number})
    return found is not None


def load_packing(number: int) -> bool:
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_fit, "_store", lambda *_: made.append(True))
        packing = packing_of(LENGTHS, 32 + number)
    expected = best_fit_decreasing(LENGTHS, 32 + number)
    assert np.array_equal(packing.order, expected.order)
    assert np.array_equal(packing.starts, expected.starts)
    return not made


KINDS = {
    "forecast": Kind(
        lambda number: forecast_cache.store(KEYS[number], {"seconds": 1.5 + number}),
        load_forecast,
        "forecasts/*",
    ),
    **RATES,
    "choices": Kind(store_choice, load_choice, "tuned.json", has_file_each=False),
    "marker": Kind(store_mark, load_mark, "trying-*"),
    "packing": Kind(lambda number: packing_of(LENGTHS, 32 + number), load_packing, "packings/*"),
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(best_fit, "CACHED_TEXTS", 100)
    return tmp_path / "cache"


def flipped(content: bytes, place: float) -> bytes:
    position = int(place * (len(content) - 1))
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


DAMAGES = {
    "random": lambda _: os.urandom(300),
    "empty": lambda _: b"",
    "zeros": lambda content: bytes(len(content)),
    "cut": lambda content: content[: len(content) // 2],
    "one byte missing": lambda content: content[:-1],
    "a list": lambda _: b"[1, 2]",
    "a number": lambda _: b"7",
    "null": lambda _: b"null",
    "lists in place of values": lambda _: b'{"key": [], "links": [[]], "a": {"choice": [1]}}',
    "deep": lambda _: b"[" * 100_000,
    "a number of a million digits": lambda _: b'{"a": ' + b"9" * 1_000_000 + b"}",
    "an older version": lambda content: content.replace(b"digest", b"sum"),
    **{
        f"bit flipped at {place}": lambda content, place=place: flipped(content, place)
        for place in (0.35, 0.5, 0.65, 0.8)
    },
}


def the_file(kind: Kind, cache: Path) -> Path:
    (file,) = cache.glob(kind.file)
    return file


def lines(kind: Kind, *, store: bool) -> set[str]:
    """Loads entry 0, which must not be there, and stores it; returns what is said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert not kind.load(0)
        if store:
            kind.store(0)
    return {str(one.message) for one in said}


def used_again(kind: Kind) -> set[str]:
    said = lines(kind, store=True)
    assert kind.load(0)
    return said


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_damaged_file_is_ignored_and_written_anew(kind, damage, cache, caplog):
    kind.store(0)
    assert kind.load(0)
    file = the_file(kind, cache)
    content = file.read_bytes()
    damaged = damage(content)
    if damaged == content:
        pytest.skip("this kind of file has no such place")
    file.write_bytes(damaged)
    assert len(used_again(kind)) <= 1


def test_a_huge_file_is_not_read(cache):
    for kind in KINDS.values():
        kind.store(0)
        os.truncate(the_file(kind, cache), 1 << 40)
        assert len(used_again(kind)) <= 1


def others_can_write(path: Path) -> None:
    path.chmod(0o666)


def the_group_can_write(path: Path) -> None:
    path.chmod(0o660)


def is_a_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def is_of_another_user(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 1234, -1)


@pytest.mark.parametrize(
    "change", [others_can_write, the_group_can_write, is_a_link, is_of_another_user]
)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_file_that_others_can_write_is_not_used(kind, change, cache):
    kind.store(0)
    change(the_file(kind, cache))
    assert len(used_again(kind)) <= 1


def is_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def is_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "mine").write_text("mine")


def is_a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("change", [is_a_pipe, is_a_folder, is_a_device])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_is_no_file_is_neither_read_nor_removed(kind, change, cache):
    kind.store(0)
    path = the_file(kind, cache)
    change(path)
    before = path.lstat().st_mode
    lines(kind, store=True)
    assert path.lstat().st_mode == before


@pytest.mark.parametrize("how", ["of another user", "writable by all"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_cache_that_others_can_write_is_not_used(kind, how, cache):
    kind.store(0)
    if how == "writable by all":
        cache.chmod(0o777)
    elif os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    else:
        os.chown(cache, 1234, -1)
    assert len(lines(kind, store=False)) <= 1
    cache.chmod(0o1777)  # as /tmp: others cannot replace files of this user
    os.chown(cache, os.geteuid(), -1)
    assert kind.load(0)


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind.has_file_each])
@pytest.mark.parametrize("copy", [shutil.copyfile, os.replace])
def test_an_entry_under_the_name_of_another_is_not_used(kind, copy, cache):
    kind.store(0)
    first = the_file(kind, cache)
    kind.store(1)
    (second,) = set(cache.glob(kind.file)) - {first}
    copy(second, first)
    assert len(used_again(kind)) <= 1


@pytest.mark.parametrize(
    ("file", "kind"),
    [*(("rates.json", kind) for kind in RATES), ("tuned.json", "choices")],
)
def test_entries_of_one_file_that_are_swapped_are_not_used(file, kind, cache):
    KINDS[kind].store(0)
    KINDS[kind].store(1)
    text = (cache / file).read_text()
    for first, second in (("card 0", "card 1"), ("adamw", "lion")):
        text = text.replace(first, "\0").replace(second, first).replace("\0", second)
    (cache / file).write_text(text)
    assert [KINDS[kind].load(number) for number in (0, 1)] == [False, False]
    assert used_again(KINDS[kind]) == set()


def test_rates_of_another_machine_are_not_used(cache, monkeypatch):
    for kind in RATES.values():
        kind.store(0)
    text = (cache / "rates.json").read_text()
    monkeypatch.setattr(machine_rates.platform, "node", lambda: "another")
    (cache / "rates.json").write_text(text.replace(os.uname().nodename, "another"))
    assert not any(kind.load(0) for kind in RATES.values())


def test_files_are_for_this_user_alone(cache):
    for kind in KINDS.values():
        kind.store(0)
    Token({}).make()
    found = [cache, *cache.rglob("*")]
    assert len(found) == 9
    for path in found:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(
    "change", [others_can_write, is_a_link, is_a_pipe, is_of_another_user, is_a_folder]
)
def test_a_token_that_others_can_write_is_refused(change, cache):
    Token({}).make()
    change(cache / "launch-token")
    with pytest.raises((PermissionError, ValueError), match="launch-token"):
        Token({}).read()


def test_only_own_entries_are_removed(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(forecast_cache, "MAX_BYTES", 1)
    monkeypatch.setattr(best_fit, "KEPT_FILES", 1)
    mine = [cache / "forecasts" / name for name in ("mine.json", "a.partial")]
    mine += [cache / "packings" / name for name in ("mine.npz", "other.npz")]
    (tmp_path / "chapter").write_text("mine")
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text("mine")
        os.utime(path, (1, 1))
    cache.chmod(0o700)
    links = [
        cache / "forecasts" / f"{'0' * 64}.json",
        cache / "packings" / f"{'0' * 64}.npz",
    ]
    for link in links:
        link.symlink_to(tmp_path / "chapter")
    for number in (0, 1):
        KINDS["forecast"].store(number)
        KINDS["packing"].store(number)
    assert [path.read_text() for path in [*mine, *links]] == ["mine"] * 6
    assert len(list((cache / "forecasts").iterdir())) == 4
    assert len(list((cache / "packings").iterdir())) == 4
