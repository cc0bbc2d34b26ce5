"""Public ds_config files: which are taken on 8 devices, and for which keys the others are refused.

The files are not here. `ZEROJAX_DS_CONFIGS=FOLDER` names a folder that holds checkouts, or parts of
them, of the repositories in `tests/data/public_ds_configs.json`; that file knows each
configuration by the SHA-1 of its bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from zerojax import deepspeed_config as deepspeed
from zerojax.config import ConfigError

DATA = Path(__file__).parents[1] / "data" / "public_ds_configs.json"
FOLDER = os.environ.get("ZEROJAX_DS_CONFIGS")
CALL = deepspeed.CallerValues(default_steps=200, hidden_size=1024)
"""What `zerojax.train` says beside the file for a language model of this width."""
PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_]+,?|\$\{\w+\},?")


def refused_keys(path: Path) -> list[str]:
    """The keys for which a file is refused on 8 devices; ["template"] where it is to be filled."""
    try:
        translation = deepspeed.explain(path, num_devices=8, given=CALL)
    except ConfigError:
        return ["unreadable"]
    lines = [line for line in translation.lines if line.verdict == "refused"]
    if any(isinstance(line.value, str) and PLACEHOLDER.fullmatch(line.value) for line in lines):
        return ["template"]
    return sorted(line.key for line in lines)


def test_the_record_holds_the_counts_that_are_claimed():
    record = json.loads(DATA.read_text())
    counts = Counter(key for file in record.values() for key in file["refused"])
    taken = sum(not file["refused"] for file in record.values())
    assert (len(record), taken, counts["template"]) == (202, 125, 23)
    # A global batch that 8 devices cannot share is refused by DeepSpeed as well.
    only_batch = sum(file["refused"] == ["train_batch_size"] for file in record.values())
    assert only_batch == 12


@pytest.mark.skipif(not FOLDER, reason="ZEROJAX_DS_CONFIGS names no folder")
def test_public_files_are_taken_or_refused_as_recorded():
    record, seen = json.loads(DATA.read_text()), set()
    for path in sorted(Path(FOLDER or "").rglob("*json")):
        if not path.is_file() or path.stat().st_size > 50_000:
            continue
        digest = hashlib.sha1(path.read_bytes()).hexdigest()
        if digest in record:
            seen.add(digest)
            assert refused_keys(path) == record[digest]["refused"], record[digest]["file"]
    assert seen, f"{FOLDER} holds none of the {len(record)} files"
    print(f"{len(seen)} of {len(record)} files")
