"""The contract: one small story for each thing promised. Their names carry the promise's number."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from perdure.testing import _keeping_checks as keeping
from perdure.testing import _log_checks as log
from perdure.testing._case import Case
from perdure.testing._values import NODE, Make

Check = Callable[[Case], Coroutine[Any, Any, None]]

CHECKS: tuple[Check, ...] = (
    log.promise_1_what_one_commit_carries_is_seen_together,
    log.promise_1_answer_seal_and_ends_of_calls_are_one_step,
    log.promise_2_a_stale_fence_is_refused_and_its_neighbours_are_not,
    log.promise_2_a_stale_fence_neither_seals_nor_ends_calls,
    log.promise_2_a_stream_that_is_gone_sealed_or_elsewhere_is_not_appended_to,
    log.promise_3_what_was_committed_is_there_after_reopening,
    log.promise_3_closing_writes_what_waits,
    log.promise_4_events_are_read_once_and_in_order,
    log.promise_4_commits_are_made_in_the_order_they_were_asked_for,
    log.promise_4_any_payload_and_any_id_comes_back_as_it_was,
    log.promise_5_committing_again_changes_nothing,
    log.promise_5_of_a_commit_that_is_partly_known_the_rest_is_added,
    log.promise_5_a_call_keeps_its_first_end,
    keeping.promise_6_a_claim_begins_a_generation_and_records_the_end_of_the_one_before,
    keeping.promise_6_no_fence_is_given_twice,
    keeping.promise_7_trimming_leaves_the_answers,
    keeping.promise_7_dropping_and_ending_take_everything,
    keeping.promise_7_sweeping_forgets_events_before_answers_and_sessions_last,
    keeping.promise_7_sweeping_a_session_takes_all_of_it_and_nothing_of_its_neighbour,
    keeping.promise_8_reading_tells_the_truth_whether_or_not_somebody_listens,
    keeping.promise_9_a_closed_store_fails_by_name_or_not_at_all,
    keeping.mail_is_collected_once_and_in_order,
    keeping.sessions_are_listed_by_id_a_page_at_a_time,
    keeping.the_newest_reader_stays_when_an_older_one_leaves,
)


async def check_store(make: Make, *, durable: bool = True) -> None:
    """Check every promise, on a fresh store each.

    `make(name)` gives a store that is not open yet; with the same name again, one on the same data. `durable=False`
    says that nothing outlives the object, and leaves out what closes and opens again.
    """
    for check in CHECKS:
        name = check.__name__
        store = make(name)
        await store.open()
        again = partial(make, name) if durable else None
        case = Case(store=store, fence=await store.join(NODE), again=again)
        try:
            await check(case)
        except AssertionError as error:
            raise AssertionError(f"{name.replace('_', ' ')}: {error}") from error
        finally:
            await case.store.aclose()
