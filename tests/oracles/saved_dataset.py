"""A folder that Hugging Face's `datasets` has saved, for tests/batches/test_record_files.py.

Needs datasets, which no test imports; run with datasets 5.2.0:

    PYTHONPATH=. python tests/oracles/saved_dataset.py tests/data/saved_dataset.tar.gz
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path

import datasets


def row(number: int) -> dict:
    messages = [
        {"role": "user", "content": f"Question {number}", "name": None},
        {"role": "assistant", "content": f"Answer {number}", "name": "it"},
    ]
    return {"messages": messages, "text": f"Text {number}."}


def main(path: str) -> None:
    whole = datasets.Dataset.from_list([row(number) for number in range(5)])
    parts = {"train": whole.shuffle(seed=0).select(range(3)), "test": whole.select(range(3, 5))}
    with tempfile.TemporaryDirectory() as folder:
        datasets.DatasetDict(parts).save_to_disk(str(Path(folder) / "saved"))
        with tarfile.open(path, "w:gz") as archive:
            archive.add(Path(folder) / "saved", "saved")


if __name__ == "__main__":
    main(sys.argv[1])
