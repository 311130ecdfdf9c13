"""Seconds from the command to the first step of training, as JSON lines.

    python benchmarks/cold_start.py configs/text_small.py --data.train text.en text.de

Three starts of `train.py` in a folder of its own: all new (a tokenizer is trained unless the config names one, texts
are tokenised, nothing is compiled); tokens there and the compilation cache empty; both there. Before them the seconds
of `import tfm` in a new process. A start ends with the line of the first step, and the process is killed.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START = [sys.executable, "-u", str(ROOT / "train.py")]


def main() -> None:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import tfm"], check=True, cwd=ROOT)
    print(json.dumps(dict(bench="cold_start", what="import tfm", seconds=round(time.perf_counter() - start, 2))))
    with tempfile.TemporaryDirectory() as folder:
        run, cache = Path(folder) / "run", Path(folder) / "cache"
        for what in ("all new", "tokens there, nothing compiled", "tokens and programs there"):
            if what.endswith("nothing compiled"):
                shutil.rmtree(cache)
            row = dict(bench="cold_start", what=what, seconds=round(seconds_to_first_step(run, cache), 2))
            print(json.dumps(row), flush=True)


def seconds_to_first_step(run: Path, cache: Path) -> float:
    """Time until `train.py` with this program's arguments prints its first step."""
    start = time.perf_counter()
    command = [*START, *sys.argv[1:], "--workdir", str(run), "--train.log-every", "1"]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                          env=environment) as process:
        lines = []
        for line in process.stdout or []:
            lines.append(line)
            if line.startswith("step 1/"):
                process.kill()
                return time.perf_counter() - start
    raise SystemExit("".join(lines[-5:]) + "the run ended before its first step")


if __name__ == "__main__":
    main()
