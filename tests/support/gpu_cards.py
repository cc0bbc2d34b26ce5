"""The cards that people ask for first, by the names they have in `zerojax.hardware.gpus`."""

DATA_CENTER = ("a100-40gb", "a100-80gb", "a100-80gb-pcie", "h100", "h100-pcie", "h200")
DATA_CENTER += ("b200", "gb200")
WORKSTATION = ("l40s", "rtx-4090", "rtx-5090", "rtx-a6000", "rtx-pro-6000")
