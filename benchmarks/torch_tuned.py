"""What makes torch fast on x86 processors of any maker: the benchmarks' `tuned` peers."""

import os
import subprocess

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def fast_path(folder: str) -> dict[str, str]:
    """The environment in which torch's math library takes its fastest kernels, by a library made in `folder`."""
    path = os.path.join(folder, "fast_path.so")
    if not os.path.exists(path):
        source = b"int mkl_serv_intel_cpu_true(void) { return 1; }"
        subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path], input=source, check=True)
    return {"LD_PRELOAD": path}
