"""Cut out of Kubernetes' client what discovery never loads: python cut_kubernetes.py [FOLDER]

The package has every kind of object of every API, twice, once for asyncio: 75 MB, of which
discovery loads 1. All of asyncio's half goes, and the APIs and kinds that are not loaded. FOLDER is
where the package is, by default as it is installed for the Python that runs this.
"""

import shutil
import sys
from pathlib import Path

from services.orchestrator.discovery.kube_api import load_client


def main(arguments: list[str]) -> None:
    package = load_client()
    loaded_from = Path(package.__file__).parent
    folder = Path(arguments[0]) if arguments else loaded_from
    kept = {
        Path(module.__file__).relative_to(loaded_from)
        for name, module in sys.modules.items()
        if name.startswith("kubernetes.") and module.__file__
    }
    shutil.rmtree(folder / "aio")
    for part in ("client/api", "client/models"):
        for path in (folder / part).glob("*.py"):
            if path.relative_to(folder) not in kept:
                path.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
