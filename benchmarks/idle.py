"""When a benchmark's turn may begin: other processes go on working, or free gigabytes, after their answer."""

import time


def wait_until_idle(most: float = 10.0) -> None:
    """Waits until the processors do nothing for a fifth of a second, at most so many seconds."""
    end = time.monotonic() + most
    before = busy_ticks()
    while time.monotonic() < end:
        time.sleep(0.2)
        now = busy_ticks()
        if now - before <= 1:
            return
        before = now


def busy_ticks() -> int:
    """Hundredths of a second that all processors together have worked so far; 0 where the system does not tell."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, *interrupts = map(int, file.readline().split()[1:9])
    except OSError:
        return 0
    return user + nice + system + sum(interrupts)
