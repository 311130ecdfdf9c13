"""What the watch says of other processes' pulses, with a clock of our own."""

from tfm.parallel.watch import PATIENCE, Watch

TIME_OUT = 30.0


def pulses(beats, *, steps=(7, 5), moves=(9, 9)):
    return {number: {"beat": [100 + number, beat], "step": step, "doing": "training", "moves": move,
                     "host": f"host{number}"}
            for number, (beat, step, move) in enumerate(zip(beats, steps, moves, strict=True))}


def make_watch(tmp_path):
    return Watch(tmp_path / "processes", time_out=TIME_OUT)


def test_a_process_that_falls_silent_is_named(tmp_path):
    watch = make_watch(tmp_path)
    assert watch._verdict(pulses([1, 1]), 0.0) is None
    assert watch._verdict(pulses([2, 2]), TIME_OUT - 1) is None
    assert watch._verdict(pulses([3, 2]), TIME_OUT + 1) is None
    message = watch._verdict(pulses([4, 2]), 2 * TIME_OUT)
    assert "process 1 on host1" in message and "its last step was 5 (training)" in message


def test_a_process_that_was_started_again_is_not_silent(tmp_path):
    watch = make_watch(tmp_path)
    watch._verdict(pulses([1, 1]), 0.0)
    again = pulses([2, 1])
    again[1]["beat"][0] = 999
    watch._verdict(again, TIME_OUT)
    assert watch._verdict(again, TIME_OUT + 5) is None


def test_where_nothing_moves_the_one_behind_is_named(tmp_path):
    watch, patience = make_watch(tmp_path), PATIENCE * TIME_OUT
    watch._verdict(pulses([1, 1]), 0.0)
    assert watch._verdict(pulses([2, 2]), patience + 1) is None  # nothing has begun: data may take long to prepare
    watch.at(7)
    watch._verdict(pulses([3, 3], moves=(10, 9)), patience + 2)
    assert watch._verdict(pulses([4, 4], moves=(10, 10)), 2 * patience) is None
    assert watch._verdict(pulses([5, 5], moves=(10, 10)), 3 * patience - 1) is None
    message = watch._verdict(pulses([6, 6], moves=(10, 10)), 3 * patience + 1)
    assert "process 1 on host1 is the furthest behind" in message
    assert "process 0 at step 7 (training); process 1 at step 5 (training)" in message


def test_an_evaluation_that_goes_on_moves(tmp_path):
    watch = make_watch(tmp_path)
    watch.at(7, "evaluation")
    before = watch._moves
    assert watch.moves() is False and watch._moves == before + 1


def test_alone_nothing_is_written(tmp_path):
    make_watch(tmp_path)
    assert not (tmp_path / "processes").exists()
