"""Cases in worker processes: the same results in the same order, and failures that stay alone."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from lab.evaluation.evaluating import drawn, evaluate
from lab.evaluation.runner import Outcome, run_all
from lab.evaluation.suite import SuiteError
from lab.evaluation.summaries import Case
from tests.unit.lab.evaluation.made_up import suite


def backwards(item: int) -> int:
    """Later items end first; the third kills its process, the fifth raises."""
    time.sleep(0.05 * (6 - item))
    if item == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if item == 5:
        raise LookupError("nothing\nhere")
    return item * item


def test_results_come_in_order_and_a_worker_that_dies_takes_nobody_along():
    ended: list[int] = []
    outcomes = run_all(backwards, [0, 1, 2, 3, 4, 5], jobs=3, on_done=lambda item, outcome: ended.append(item))
    assert [outcome.result for outcome in outcomes] == [0, 1, 4, None, 16, None]
    assert "died without a word" in outcomes[3].error
    assert outcomes[5].error.startswith("LookupError: nothing here (test_runner.py:")
    assert sorted(ended) == [0, 1, 2, 3, 4, 5]
    assert multiprocessing.active_children() == []


def test_nothing_to_do_is_done():
    assert run_all(backwards, [], jobs=2) == []


def test_one_process_and_two_give_the_same_evaluation():
    alone = evaluate(suite(), jobs=1)
    ended: list[Case] = []
    shared = evaluate(suite(), jobs=2, on_done=lambda case, outcome: ended.append(case))
    assert shared == alone
    assert list(shared.runs) == list(suite().cases)
    assert sorted(ended) == sorted(suite().cases)
    assert shared.failures == {}


def test_a_case_that_fails_is_named_and_the_others_are_there():
    bad = Case("fast", "one", 2)
    evaluation = evaluate(suite(breaking={bad: "the sky"}), jobs=1)
    assert list(evaluation.failures) == [bad]
    assert evaluation.failures[bad].startswith("RuntimeError: the sky fell on fast")
    assert len(evaluation.runs) == 11
    assert [run.case.seed for run in evaluation.of("fast", "one")] == [1, 3]


def test_a_result_that_is_another_cases_is_a_failure():
    def run(case):
        return suite().run(Case("slow", "one", 1))

    with pytest.raises(SuiteError, match="cannot be sent to a worker process"):
        evaluate(suite(run=run), jobs=1)
    evaluation = evaluate(suite(run=always_the_same), jobs=1)
    assert len(evaluation.runs) == 1
    assert "the result is of slow on one, seed 1" in evaluation.failures[Case("fast", "one", 1)]


def always_the_same(case: Case):
    """A suite's mistake."""
    return suite().run(Case("slow", "one", 1))


def test_only_what_is_drawn_keeps_its_timeline():
    evaluation = evaluate(suite(plotted=("fast",)), jobs=1)
    kept = {case for case, run in evaluation.runs.items() if run.timeline}
    assert kept == {Case("fast", "one", 1), Case("fast", "other", 1)} == set(drawn(suite(plotted=("fast",))))


INTERRUPTED = """
import os, signal, sys, time
from lab.evaluation.runner import run_all

def forever(item):
    os.write(1, b"working\\n")  # whole, though two write at once
    time.sleep(60)

if __name__ == "__main__":
    # Tests that run in the background of a shell inherit that interrupts are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run_all(forever, [1, 2, 3], jobs=2)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize("everybody", [True, False], ids=["as a terminal sends it", "to the parent alone"])
def test_an_interrupt_ends_the_workers_without_a_traceback(tmp_path, everybody):
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == "working\n"
    if everybody:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 130
    assert complaints == ""
    # The tracker of shared memory ends a moment after the process whose it is.
    give_up = time.monotonic() + 30
    while _is_there(process.pid) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not _is_there(process.pid)


CUT_OFF = """
import multiprocessing.popen_spawn_posix as spawning, os, pathlib, signal, sys, time
from lab.evaluation.runner import run_all
from trimtab.cli.signals import ended_by_sigterm

launch = spawning.Popen._launch

def launch_and_be_ended(self, process):
    # The worker is up, and its starter has not taken note of it yet.
    launch(self, process)
    if "2" in process.name:
        while not all(pathlib.Path(f"up-{number}").exists() for number in (1, 2)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

class Work:
    def __call__(self, item):
        time.sleep(600)

    def __setstate__(self, state):
        number = 2 if pathlib.Path("up-1").exists() else 1
        pathlib.Path(f"up-{number}").touch()

    def __getstate__(self):
        return {"some": "state"}

if __name__ == "__main__":
    spawning.Popen._launch = launch_and_be_ended
    with ended_by_sigterm():
        run_all(Work(), [1, 2, 3], jobs=2)
"""


def test_a_worker_is_ended_though_the_run_was_ended_while_it_started(tmp_path):
    script = tmp_path / "cut_off.py"
    script.write_text(CUT_OFF)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        start_new_session=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    try:
        assert process.wait(timeout=60) == 143
        give_up = time.monotonic() + 30
        while _is_there(process.pid) and time.monotonic() < give_up:
            time.sleep(0.02)
        assert not _is_there(process.pid)
    finally:
        if _is_there(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_outcome_is_a_result_or_an_error():
    assert Outcome(1).error is None
    assert Outcome(None, "no").result is None
