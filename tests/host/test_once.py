"""Is everything said once, whoever says it?"""

import logging
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

from qla_jit.once import first_time, warn_once


def test_the_first_time_is_the_first_of_all_its_words_together():
    what = uuid.uuid4().hex
    assert [first_time(what), first_time(what), first_time(what, "more"), first_time(what, "more")] == [True, False, True, False]


def test_of_threads_that_ask_together_one_is_the_first():
    together = threading.Barrier(8)

    def ask(what):
        together.wait()
        return first_time(what)

    with ThreadPoolExecutor(max_workers=8) as threads:
        for _ in range(50):
            assert sorted(threads.map(ask, [uuid.uuid4().hex] * 8)) == [False] * 7 + [True]


def test_a_warning_is_logged_once(caplog):
    message = f"{uuid.uuid4().hex} is 100 % full"
    warn_once(message)
    warn_once(message)
    assert caplog.record_tuples == [("qla_jit", logging.WARNING, message)]
