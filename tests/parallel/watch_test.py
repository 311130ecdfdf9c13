"""What the watch says of other processes' pulses, with a clock of our own."""

from tfm.parallel.watch import LOST_SECONDS, STALL_SECONDS, Watch


def pulses(beats, steps=(7, 5)):
    return {number: {"beat": [100 + number, beat], "step": step, "host": f"host{number}"}
            for number, (beat, step) in enumerate(zip(beats, steps, strict=True))}


def test_a_process_that_falls_silent_is_named(tmp_path):
    watch = Watch(tmp_path / "processes")
    assert watch._verdict(pulses([1, 1]), 0.0) is None
    assert watch._verdict(pulses([2, 2]), LOST_SECONDS - 1) is None
    assert watch._verdict(pulses([3, 2]), LOST_SECONDS + 1) is None
    message = watch._verdict(pulses([4, 2]), 2 * LOST_SECONDS)
    assert "process 1 on host1" in message and "its last step was 5" in message


def test_a_process_that_was_started_again_is_not_silent(tmp_path):
    watch = Watch(tmp_path / "processes")
    watch._verdict(pulses([1, 1]), 0.0)
    again = pulses([2, 1])
    again[1]["beat"][0] = 999
    watch._verdict(again, LOST_SECONDS)
    assert watch._verdict(again, LOST_SECONDS + 5) is None


def test_where_no_step_ends_the_one_behind_is_named(tmp_path):
    watch = Watch(tmp_path / "processes")
    watch.at(7)
    start = watch._since
    assert watch._verdict(pulses([1, 1]), start + STALL_SECONDS - 1) is None
    message = watch._verdict(pulses([2, 2]), start + STALL_SECONDS + 1)
    assert "process 1 on host1" in message and "at step 5" in message
    watch.at(7, "evaluation")
    assert watch._verdict(pulses([3, 3]), start + 10 * STALL_SECONDS) is None


def test_alone_nothing_is_written(tmp_path):
    Watch(tmp_path / "processes")
    assert not (tmp_path / "processes").exists()
