"""The commands that measure and predict. They need numpy, which the orchestrator's image, where the
others are of use too, has not."""

import importlib.util
from types import ModuleType

MEASURING: tuple[ModuleType, ...] = ()
if importlib.util.find_spec("numpy") is not None:
    from outrider.cli import bench, plan, simulate

    MEASURING = (bench, plan, simulate)
